"""Pages that were given back before it was known what became of the last step that was to write to them.

A flagged row writes nothing. Where its request is aborted, or preempted, before that is known, its pages are
free by then, and their hashes, made while the step was put together, promise what was never written. And who
had read such pages may have given them back as well, while the token made of them is still under way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Tagged = tuple[int, int]
"""(page, tag under which it was given); the null page with no tag where attention never looks."""
Rows = Sequence[Sequence[Tagged]]
"""By cache group, in logical order."""


@dataclass(frozen=True, slots=True)
class GivenBack:
    rows: Rows
    """What the request had."""
    written: Sequence[Sequence[int | None]]
    """Its tables; None for a page that the request did not write to."""
    told: bool
    """Whether it was flagged before it gave them back."""
    last: int
    """Number of the last step for which it had them."""


NOTHING = GivenBack((), (), told=False, last=0)


class Parted:
    def __init__(self) -> None:
        self.step = 0
        """Number of the step that was put together last."""
        self._given_back: dict[str, GivenBack] = {}

    def add(
        self, request_id: str, rows: Rows, written: Sequence[Sequence[int | None]], *, told: bool
    ) -> None:
        """Given back now; the arguments are those of `GivenBack`."""
        self._given_back[request_id] = GivenBack(rows, written, told, last=self.step)

    def take(self, request_id: str) -> GivenBack:
        """What was added, once; nothing for one that gave nothing back since the steps under way began."""
        return self._given_back.pop(request_id, NOTHING)

    def who_had(self, page: int, since: int) -> dict[str, Rows]:
        """Requests that gave the page back, and were given it under this tag or a later one: a page that is
        freed gets another, and what it holds may be found all the same. Returns what they had."""
        return {
            request_id: what.rows
            for request_id, what in self._given_back.items()
            if any(held == page and tag >= since for row in what.rows for held, tag in row)
        }

    def settled(self, step: int) -> None:
        """What became of this step, and of all before it, is known."""
        for request_id in [r for r, what in self._given_back.items() if what.last <= step]:
            del self._given_back[request_id]
