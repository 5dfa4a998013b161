"""Who read pages that a flagged request was to write, and did not: they found them by their hashes."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.parted import GivenBack, Parted, Rows
from kv_transfer.integrity.tags import NO_TAG

Plan = Mapping[str, tuple[int, int]]
"""A step: tokens that each of its requests had computed before it, and those that it computes now."""
Steps = Mapping[int, Plan]
"""By number, in order."""
Readers = dict[str, tuple[PageFault, int]]
"""Why what each of them read is a fault, and its first token that lies there."""
ALL = sys.maxsize
"""Tokens of a request that has written all that it was to write."""


def computed_before(request_id: str, steps: Steps, where: int, last: int = ALL) -> int:
    """Tokens of the request before the first of these steps, up to the last one, in which it reads as far as
    this token. One that is in no such step was not to write anything."""
    its = (plan[request_id] for number, plan in steps.items() if request_id in plan and number <= last)
    return next((computed for computed, count in its if computed + count > where), ALL)


def to_write(ledger: GenerationLedger, request_id: str, sizes: Sequence[int], computed: int) -> set[int]:
    """Pages of the request's own, from the one that holds its token after so many.

    Args:
        sizes: tokens in a page, by cache group.
    """
    rows = (ledger.row(request_id, group)[computed // size :] for group, size in enumerate(sizes))
    return _of(ledger, request_id, (page for row in rows for page, _ in row))


def was_to_write(
    ledger: GenerationLedger, request_id: str, sizes: Sequence[int], computed: int, gone: GivenBack
) -> set[int]:
    """The same, of a request that gave its pages back. What others have written to since is theirs."""
    tables = (table[computed // size :] for table, size in zip(gone.written, sizes, strict=False))
    return _of(ledger, request_id, (page for table in tables for page in table if page is not None))


def _of(ledger: GenerationLedger, request_id: str, pages: Iterable[int]) -> set[int]:
    return {page for page in pages if ledger.author(page) == request_id}


def who_read(
    ledger: GenerationLedger, parted: Parted, request_id: str, sizes: Sequence[int], pages: Iterable[int]
) -> Readers:
    """Others who have, or had, these pages of the request's."""
    readers: Readers = {}
    for page in sorted(pages):
        tag = ledger.authored(page)
        had = {r: [ledger.row(r, group) for group in range(len(sizes))] for r in ledger.owners(page)}
        fault = PageFault(IntegrityCause.STALE_PREFIX, page, tag, NO_TAG)
        for reader, rows in (parted.who_had(page, tag) | had).items():
            readers.setdefault(reader, (fault, _first_token(rows, sizes, page)))
    readers.pop(request_id, None)
    return readers


def _first_token(rows: Rows, sizes: Sequence[int], page: int) -> int:
    places = (
        index * size
        for row, size in zip(rows, sizes, strict=False)
        for index, (held, _) in enumerate(row)
        if held == page
    )
    return min(places, default=0)
