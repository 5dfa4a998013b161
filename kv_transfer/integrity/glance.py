"""The check of a step that is right, which nearly every step is: a few comparisons of whole arrays.

`Glance.passes` answers only whether `check_numpy` would find nothing. What is wrong, and where, is worked out
by `check_numpy` alone, when a glance does not pass.
"""

from typing import Final

import numpy as np

from kv_transfer.integrity.shadow import STALE, Bools, GroupRows, GroupShape, Int32s, Int64s
from kv_transfer.integrity.verify import Batch, Tables, positions

_NO_INT32S: Final[Int32s] = np.empty(0, np.int32)


class Glance:
    """One cache group's shadow in the order of the batch. Renewed row by row, where something changed."""

    def __init__(self, rows: GroupRows, shape: GroupShape) -> None:
        self._rows, self._shape = rows, shape
        self._version = -1
        self._order = b""
        """Slots of the batch's rows."""
        self._begin = self._end = _NO_INT32S
        """Of each row: its pages `begin ... end - 1` are read."""
        self._batch: Batch
        self._length = _NO_INT32S
        self.pages = 0
        """That are read in this step."""
        self._width = 0
        """Pages up to the end of the longest row."""
        self._make_room(0, 0)

    def _make_room(self, count: int, width: int) -> None:
        """[rows of the batch, width of the shadow]"""
        self._pages: Int32s = np.full((count, width), STALE, np.int32)
        self._inside: Bools = np.zeros((count, width), np.bool_)
        """Whether the entry is read."""
        self._differs: Bools = np.zeros((count, width), np.bool_)
        self._whole: Bools = np.zeros(count, np.bool_)
        """[rows]: every entry that is read is known, and none is `STALE`."""
        self._right = False
        """Every row is whole."""
        self._own_last = False
        """Every row may write to its last page."""
        self._last_slot: Int64s = np.empty(0, np.int64)
        """[rows]: the last page's first slot, less the tokens of the pages before it."""
        self._index = np.arange(width, dtype=np.int32)
        self._one_each = np.arange(count + 1, dtype=np.int32).tobytes()

    def look(self, batch: Batch) -> None:
        """Once a step, before `passes`; `batch` has a row at least."""
        self._batch = batch
        self._length = batch.computed + (batch.starts[1:] - batch.starts[:-1])
        size, window = self._shape.block_size, self._shape.window
        end = (self._length + (size - 1)) // size
        if window is not None:
            begin = np.maximum(0, batch.computed - (window - 1)) // size
        elif len(end) == len(self._begin):
            begin = self._begin
        else:
            begin = np.zeros(len(end), np.int32)
        if batch.slots.tobytes() != self._order or self._rows.pages.shape[1] != self._pages.shape[1]:
            self._make_room(len(end), self._rows.pages.shape[1])
            renewed = np.ones(len(end), np.bool_)
        elif (
            self._rows.version == self._version
            and end.tobytes() == self._end.tobytes()
            and begin.tobytes() == self._begin.tobytes()
        ):
            return
        else:
            renewed = self._rows.changed[batch.slots] | (end != self._end) | (begin != self._begin)
        self._order, self._begin, self._end = batch.slots.tobytes(), begin, end
        self._renew(np.flatnonzero(renewed))
        self._rows.changed[:] = False
        self._version = self._rows.version

    def _renew(self, at: Int64s) -> None:
        """Take in rows that changed, or of which another part is read now."""
        slots = self._batch.slots[at]
        self._pages[at] = pages = self._rows.pages[slots]
        self._inside[at] = inside = (self._index < self._end[at, None]) & (
            self._index >= self._begin[at, None]
        )
        # A slot of -1 is the last row in numpy's eyes.
        self._whole[at] = (slots >= 0) & ~((pages < 0) & inside).any(axis=1)
        self._width = int(self._end.max())
        self.pages = int((self._end - self._begin).sum())
        self._right = bool(self._whole.all()) and self._width <= self._pages.shape[1]
        if self._right:
            last = self._end - 1
            row = np.arange(len(last))
            self._own_last = bool(self._rows.own[self._batch.slots, last].all())
            self._last_slot = (self._pages[row, last].astype(np.int64) - last) * self._shape.block_size

    def passes(self, tables: Tables) -> bool:
        """Whether all is right with the step that was looked at."""
        batch, width = self._batch, self._width
        count = len(batch.slots)
        if not self._right or width > tables.block_table.shape[1]:
            return False
        if tables.seq_lens[:count].tobytes() != self._length.tobytes():
            return False
        if tables.query_start_loc[: count + 1].tobytes() != batch.starts.tobytes():
            return False
        if tables.slot_mapping[: batch.tokens].tobytes() != self._expected_slots().tobytes():
            return False
        differs = self._differs[:, :width]
        np.not_equal(tables.block_table[:count, :width], self._pages[:, :width], out=differs)
        np.logical_and(differs, self._inside[:, :width], out=differs)
        return not differs.any()

    def _expected_slots(self) -> Int64s:
        """Of the step's tokens; none where the rows may not write to all of them."""
        batch, size = self._batch, self._shape.block_size
        if batch.starts.tobytes() == self._one_each:  # decode only: each token lies in its row's last page
            return self._last_slot + batch.computed if self._own_last else self._last_slot[:0]
        row, position = positions(batch, batch.starts[1:] - batch.starts[:-1])
        index = position // size
        page = self._pages[row, index].astype(np.int64)
        own = self._rows.own[batch.slots[row], index]
        return (page - index) * size + position if own.all() else page[:0]
