"""What the block tables must say, kept beside the model and updated with each step's changes.

Tags are unique, so "every page of the row has the tag that the request was given" is the same as "the row
shows the pages that the request was given, and none of them has changed its tag since". The second half
changes with deltas only: an entry whose page was retagged turns into `STALE`, which no table can equal. What
is left to do each step is one comparison of 32-bit numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.tags import NO_TAG

STALE: Final = -1
"""In place of a page: nothing that may be read or written lies here."""

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """How one cache group is read."""

    block_size: int
    """Token slots in a page."""
    window: int | None = None
    """Tokens that attention looks back on, the current one included; None: all."""

    def first_page(self, computed: int) -> int:
        """First page that a step reads after `computed` tokens."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // self.block_size


class GroupRows:
    """Rows of one cache group, by slot. All arrays are [slots, width]."""

    def __init__(self, slots: int, width: int) -> None:
        self.pages: Int32s = np.full((slots, width), STALE, np.int32)
        """Page numbers as tables must show them, or `STALE`."""
        self.given: Int32s = np.full((slots, width), STALE, np.int32)
        """The same, also of pages that changed hands; `STALE` where attention never looks."""
        self.tags: Int64s = np.full((slots, width), NO_TAG, np.int64)
        """Tags under which the pages were given."""
        self.own: Bools = np.zeros((slots, width), np.bool_)
        """Whether the row's request may write to the page."""
        self.changed: Bools = np.zeros(slots, np.bool_)
        """[slots]: whether the row changed since this was last reset; for one who keeps copies of rows."""
        self.version = 0
        """Counts changes."""
        self.edits: list[tuple[int, int, int]] | None = None
        """Entries (slot, start, end) that were written to, for one who keeps a copy of them and empties this;
        None: nobody does."""

    def change(self, slot: int, start: int, end: int) -> None:
        """To be told whenever entries were written to."""
        self.changed[slot] = True
        self.version += 1
        if self.edits is not None:
            self.edits.append((slot, start, end))

    def clear(self, slot: int, start: int = 0, end: int | None = None) -> None:
        self.pages[slot, start:end] = STALE
        self.given[slot, start:end] = STALE
        self.tags[slot, start:end] = NO_TAG
        self.own[slot, start:end] = False
        self.change(slot, start, self.pages.shape[1] if end is None else end)

    def widen(self, slots: int, width: int) -> None:
        """Make room; what is there stays."""
        grown = GroupRows(slots, width)
        for name in ("pages", "given", "tags", "own"):
            old = getattr(self, name)
            getattr(grown, name)[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, getattr(grown, name))
        grown.changed[: len(self.changed)] = self.changed
        self.changed = grown.changed


class Shadow:
    """All groups' rows of one engine, and the tag of every page. Not thread-safe."""

    def __init__(self, pages: int, groups: Sequence[GroupShape], *, rows: int = 16, width: int = 16) -> None:
        """
        Args:
            rows, width: room to begin with; it grows as needed.
        """
        self.shapes = tuple(groups)
        self.tags: Int64s = np.zeros(pages, np.int64)
        self.rows = tuple(GroupRows(rows, width) for _ in groups)
        self._holders: Int32s = np.zeros(pages, np.int32)
        """Entries that show the page: almost always 0 when its tag changes, so that nothing is searched."""
        self._slots: dict[str, int] = {}
        self.moves = 0
        """Counts requests that got a slot, or gave theirs back."""
        self._vacant = list(range(rows))[::-1]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def room(self) -> int:
        """Slots, vacant ones too."""
        return len(self.rows[0].pages)

    def slot(self, request_id: str) -> int:
        """Where the request's rows lie; -1 for one that was never told."""
        return self._slots.get(request_id, -1)

    def apply(self, delta: LedgerDelta) -> None:
        """O(what changed)."""
        for request_id in delta.dropped:
            self._drop(request_id)
        for skip in delta.skipped:
            rows = self.rows[skip.group]
            slot = self._slots[skip.request_id]
            self._hold(rows.given[slot, skip.start : skip.end], -1)
            rows.clear(slot, skip.start, skip.end)
        if delta.tags:
            self._retag(list(delta.tags), list(delta.tags.values()))
        for grown in delta.grown:
            self._grow(grown)

    def revoke(self, pages: Iterable[int]) -> None:
        """These pages do not hold what they were to hold: whoever is given them, under whatever hash, must
        not read them until they are allocated anew."""
        pages = list(pages)
        if pages:
            self._retag(pages, [NO_TAG] * len(pages))

    def _drop(self, request_id: str) -> None:
        slot = self._slots.pop(request_id)
        self.moves += 1
        for rows in self.rows:
            self._hold(rows.given[slot], -1)
            rows.clear(slot)
        self._vacant.append(slot)

    def _retag(self, pages: list[int], tags: list[int]) -> None:
        self.tags[pages] = tags
        held = [page for page in pages if self._holders[page]]
        if held:
            for rows in self.rows:
                lost = np.isin(rows.given, held) & (rows.tags != self._current(rows.given))
                rows.pages[lost] = STALE
                for where, index in np.argwhere(lost).tolist():
                    rows.change(where, index, index + 1)

    def _current(self, pages: Int32s) -> Int64s:
        tags: Int64s = self.tags[np.maximum(pages, 0)]
        return tags

    def _grow(self, grown: RowGrowth) -> None:
        slot = self._slots.get(grown.request_id)
        if slot is None:
            slot = self._slots[grown.request_id] = self._vacate()
            self.moves += 1
        end = grown.start + len(grown.pages)
        rows = self.rows[grown.group]
        if end > rows.pages.shape[1]:
            rows.widen(rows.pages.shape[0], max(end, 2 * rows.pages.shape[1]))
        tags = np.array(grown.tags, np.int64)
        given = np.where(tags == NO_TAG, STALE, np.array(grown.pages, np.int32)).astype(np.int32)
        rows.given[slot, grown.start : end] = given
        rows.tags[slot, grown.start : end] = tags
        rows.own[slot, grown.start : end] = grown.own
        rows.pages[slot, grown.start : end] = np.where(self._current(given) == tags, given, STALE)
        rows.change(slot, grown.start, end)
        self._hold(given, 1)

    def _vacate(self) -> int:
        if not self._vacant:
            slots = self.rows[0].pages.shape[0]
            for rows in self.rows:
                rows.widen(2 * slots, rows.pages.shape[1])
            self._vacant = list(range(slots, 2 * slots))[::-1]
        return self._vacant.pop()

    def _hold(self, given: Int32s, by: int) -> None:
        np.add.at(self._holders, given[given != STALE], by)
