"""What runs before the forward: clearing fresh pages, and copying a shared page before it is written to.

The scheduler side says which of it is rightful (`Rights`), the worker compares. Both lists are empty on most
engines and steps.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.tags import NO_TAG, tag_domain

Copy = tuple[int, int]
"""(from, to)"""


@dataclass(slots=True)
class Rights:
    """Of one step. Tags are those under which the pages are known now."""

    clear: dict[int, tuple[int, str]] = field(default_factory=dict)
    """page -> (tag, the request that it was allocated for)"""
    copy: dict[Copy, tuple[int, int, str]] = field(default_factory=dict)
    """(from, to) -> (their tags, the request that the target was allocated for)"""

    def __bool__(self) -> bool:
        return bool(self.clear or self.copy)


def rights_of(ledger: GenerationLedger, clear: Iterable[int], copies: Iterable[Copy]) -> Rights:
    """Of what the scheduler ordered, that which the ledger agrees with.

    A page may be cleared, or copied to, in the step for which it was allocated, while the one request that it
    was allocated for is its only owner.
    """
    rights = Rights()
    for page in clear:
        if (owner := _only_owner(ledger, page)) is not None:
            rights.clear[page] = (ledger.tag(page), owner)
    for source, target in copies:
        owner = _only_owner(ledger, target)
        if owner is not None and not ledger.is_free(source) and _same_tenant(ledger, source, target):
            rights.copy[source, target] = (ledger.tag(source), ledger.tag(target), owner)
    return rights


def _same_tenant(ledger: GenerationLedger, source: int, target: int) -> bool:
    return tag_domain(ledger.tag(source)) == tag_domain(ledger.tag(target))


def _only_owner(ledger: GenerationLedger, page: int) -> str | None:
    writer = ledger.writer(page) if ledger.is_fresh(page) else None
    return writer if ledger.owners(page) == {writer} else None


@dataclass(frozen=True, slots=True)
class Judged:
    clear: list[int]
    """What may be cleared of that which was to be."""
    copies: list[Copy]
    faults: dict[str, PageFault]
    """Requests whose page was not cleared, or not copied to, as it should have been."""
    refused: list[IntegrityCause]
    """One for each entry that was taken out."""


def judge(clear: Sequence[int], copies: Sequence[Copy], rights: Rights, tag: Callable[[int], int]) -> Judged:
    """Compare what is about to run with what is rightful.

    Args:
        tag: of a page, as this worker knows it; 0 for what is no page.
    """
    clearing = [page for page in clear if page in rights.clear and rights.clear[page][0] == tag(page)]
    copying = [pair for pair in copies if pair in rights.copy and _tags(pair, tag) == rights.copy[pair][:2]]
    faults: dict[str, PageFault] = {}
    for page, (expected, owner) in rights.clear.items():
        if page not in clearing:
            faults[owner] = PageFault(IntegrityCause.ZERO_TARGET, page, expected, tag(page))
    for pair, (_, expected, owner) in rights.copy.items():
        if pair not in copying:
            faults[owner] = PageFault(
                IntegrityCause.COW_SOURCE, pair[1], expected, _source(pair, copies, tag)
            )
    refused = [IntegrityCause.ZERO_TARGET] * (len(clear) - len(clearing))
    refused += [IntegrityCause.COW_SOURCE] * (len(copies) - len(copying))
    return Judged(clearing, copying, faults, refused)


def _tags(pair: Copy, tag: Callable[[int], int]) -> tuple[int, int]:
    return tag(pair[0]), tag(pair[1])


def _source(pair: Copy, copies: Sequence[Copy], tag: Callable[[int], int]) -> int:
    """Tag of the page that was about to be copied to the target."""
    instead: Mapping[int, int] = {target: source for source, target in copies}
    return tag(instead[pair[1]]) if pair[1] in instead else NO_TAG
