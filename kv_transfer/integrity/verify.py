"""The check before each forward: what attention is about to read and write, against the shadow.

Three forms with one meaning, kept equal by tests:

    check_numpy    compares tables with the shadow; used on CPU
    check_torch    gathers tags through the tables, and compares those: the reference, on any device
    check_triton   as `check_numpy`, one program a row, on CUDA (`verify_triton.py`)

None of them waits for the device. The answer is `findings`, int32 [rows, 3]: what is wrong with each row
first (`Finding`), where, and the page that was found there.

    LENGTH   the row's sequence length, or its place in the batch, is not the expected one; where: the length
    READ     where: logical index of the first page in the read range that is not the request's
    POISONED the row was flagged in an earlier step, or in another group; on a device only (`RowTensors`)
    WRITE    where: position of the first token that would be written elsewhere, or to another's page

Pages beyond the read range, rows beyond the batch and tokens beyond its last row are padding, and ignored.
The null page may lie where attention does not look, and is always wrong where it does.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.integrity.shadow import STALE, Bools, GroupRows, GroupShape, Int32s, Int64s
from kv_transfer.integrity.tags import NO_TAG

NO_SLOT: Final = -1
"""In a slot mapping: this token is not written."""
NULL_PAGE: Final = 0
_FAR: Final = 2**31 - 1


class Finding(IntEnum):
    NOTHING = 0
    LENGTH = 1
    READ = 2
    WRITE = 3
    POISONED = 4


@dataclass(frozen=True, slots=True)
class Tables:
    """What the kernels get for one cache group: arrays or tensors, longer than the batch where padded."""

    block_table: Any
    """int32 [rows, pages]"""
    seq_lens: Any
    """int32 [rows]: tokens of each row after this step"""
    query_start_loc: Any
    """int32 [rows + 1]: where each row's tokens begin in the batch"""
    slot_mapping: Any
    """int64 [tokens]: page * block size + offset"""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the scheduler ordered, in the order of the batch's rows: arrays, or tensors of the same types."""

    slots: Any
    """int64 [rows]: the shadow's row of each request; -1: none"""
    computed: Any
    """int32 [rows]: tokens before this step"""
    starts: Any
    """int32 [rows + 1]"""
    tokens: int
    """Of all rows, in this step."""


def batch_of(slots: list[int], computed: list[int], scheduled: list[int]) -> Batch:
    starts = starts_of(np.array(scheduled, np.int32))
    return Batch(np.array(slots, np.int64), np.array(computed, np.int32), starts, int(starts[-1]))


def starts_of(scheduled: Int32s) -> Int32s:
    """Where each row's tokens begin, and where the last one's end."""
    starts = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(scheduled, out=starts[1:])
    return starts


def check_numpy(tables: Tables, batch: Batch, rows: GroupRows, shape: GroupShape) -> Int32s:
    """Findings, of arrays."""
    count = len(batch.slots)
    findings = np.zeros((count, 3), np.int32)
    if count == 0:
        return findings
    size = shape.block_size
    scheduled = batch.starts[1:] - batch.starts[:-1]
    length = batch.computed + scheduled
    end = -(-length // size)
    pages = _expected_pages(rows, batch.slots, int(end.max()))
    table = _wide(tables.block_table[:count], pages.shape[1])
    reads = _wrong_reads(table, pages, batch, end, shape)
    row, position = positions(batch, scheduled)
    slots = _first(tables.slot_mapping, batch.tokens)
    writes = _wrong_writes(slots, row, position, pages, rows.own, batch.slots, size)
    lengths = (tables.seq_lens[:count] != length) | (tables.query_start_loc[:count] != batch.starts[:-1])
    lengths |= tables.query_start_loc[1 : count + 1] != batch.starts[1:]
    # What matters most last: it stands over the others.
    for token in np.flatnonzero(writes)[::-1] if writes.any() else ():
        written = min(slots[token] // size, _FAR) if slots[token] >= 0 else -1
        findings[row[token]] = (Finding.WRITE, position[token], written)
    if reads.any():
        for i in np.flatnonzero(reads.any(axis=1)):
            first = reads[i].argmax()
            findings[i] = (Finding.READ, first, table[i, first])
    for i in np.flatnonzero(lengths) if lengths.any() else ():
        findings[i] = (Finding.LENGTH, tables.seq_lens[i], -1)
    return findings


def _expected_pages(rows: GroupRows, slots: Int64s, width: int) -> Int32s:
    """[rows, width]; nothing for a request that has no row, or not so many pages."""
    known = _wide(rows.pages[slots, :width], width)
    if slots.min() < 0:
        known[slots < 0] = STALE
    return known


def _wide(rows: Int32s, width: int) -> Int32s:
    """Cut, or filled with -1."""
    missing = width - rows.shape[1]
    return rows[:, :width] if missing <= 0 else np.pad(rows, ((0, 0), (0, missing)), constant_values=-1)


def _wrong_reads(table: Int32s, pages: Int32s, batch: Batch, end: Int32s, shape: GroupShape) -> Bools:
    """[rows, width]"""
    wrong: Bools = table != pages
    wrong |= pages < 0
    index = np.arange(pages.shape[1], dtype=np.int32)
    wrong &= index < end[:, None]
    if shape.window is not None:
        begin = np.maximum(0, batch.computed - shape.window + 1) // shape.block_size
        wrong &= index >= begin[:, None]
    return wrong


def positions(batch: Batch, scheduled: Int32s) -> tuple[Int64s, Int64s]:
    """Of each token: its row, and its place in the row's text."""
    if batch.tokens == len(batch.slots) and scheduled.max() == 1:  # decode only
        return np.arange(batch.tokens), batch.computed.astype(np.int64)
    row = np.repeat(np.arange(len(batch.slots)), scheduled)
    return row, np.arange(batch.tokens) - (batch.starts[:-1] - batch.computed)[row]


def _wrong_writes(  # noqa: PLR0917
    slots: Int64s, row: Int64s, position: Int64s, pages: Int32s, own: Bools, of_row: Int64s, size: int
) -> Bools:
    """[tokens]"""
    index = position // size
    # A page that nothing may be written to is found as a wrong read already.
    wrong: Bools = slots != pages[row, index].astype(np.int64) * size + position % size
    wrong |= ~own[of_row[row], np.minimum(index, own.shape[1] - 1)]
    return wrong


def _first(slot_mapping: Int64s, tokens: int) -> Int64s:
    missing = tokens - len(slot_mapping)
    return slot_mapping[:tokens] if missing <= 0 else np.pad(slot_mapping, (0, missing), constant_values=-1)


def contain(tables: Tables, batch: Batch, flagged: Any) -> None:
    """Rows that are flagged (bool [rows]) write nothing and read the null page. In place, of either kind."""
    if isinstance(flagged, torch.Tensor):
        _contain_torch(tables, batch, flagged)
        return
    count = len(batch.slots)
    tables.block_table[:count][flagged] = NULL_PAGE
    length = batch.computed + np.diff(batch.starts)
    tables.seq_lens[:count][flagged] = length[flagged]
    masked = np.repeat(flagged, np.diff(batch.starts))[: len(tables.slot_mapping)]
    tables.slot_mapping[: batch.tokens][masked] = NO_SLOT


@dataclass(frozen=True, slots=True)
class RowTensors:
    """One group's rows of the shadow, on the device; see `shadow.GroupRows`."""

    page_tags: torch.Tensor
    """int64 [pages], of the whole cache."""
    tags: torch.Tensor
    pages: torch.Tensor
    own: torch.Tensor
    poison: torch.Tensor
    """uint8 [slots]: not 0 once the row was flagged, until its slot is given to another request."""


def check_torch(tables: Tables, batch: Batch, rows: RowTensors, shape: GroupShape) -> torch.Tensor:
    """Findings, of tensors."""
    page_tags, row_tags, own = rows.page_tags, rows.tags, rows.own
    count = batch.slots.shape[0]
    size = shape.block_size
    length = batch.computed + batch.starts[1:] - batch.starts[:-1]
    table = tables.block_table[:count].long()
    width = min(table.shape[1], row_tags.shape[1])
    index = torch.arange(max(table.shape[1], row_tags.shape[1]) + 1, device=table.device)
    table = _padded(table, len(index), -1)
    expected = _padded(row_tags[batch.slots], len(index), NO_TAG) * (batch.slots >= 0)[:, None]
    wrong = (_tags_of(table, page_tags) != expected) | (expected == NO_TAG)
    # One column beyond the tables stands for all that a row reads beyond them.
    begin, end = _read_range(batch, shape)
    wrong[:, width:] = True
    wrong &= (index >= begin[:, None]) & (index < end[:, None])
    first = torch.where(wrong, index, _FAR).amin(dim=1)
    first = torch.where((begin >= len(index)) & (begin < end), begin, first)
    found = table.gather(1, first.clamp(max=len(index) - 1)[:, None])[:, 0]

    token = torch.arange(batch.tokens, device=table.device)
    row = _rows_of(token, batch)
    position = token - batch.starts[row] + batch.computed[row]
    place = (position // size).clamp(max=len(index) - 1)
    slot = _padded(tables.slot_mapping[None, : batch.tokens], batch.tokens, NO_SLOT)[0]
    to = torch.where(slot >= 0, slot.div(size, rounding_mode="floor"), -1)
    right = (
        (_tags_of(to, page_tags) == expected[row, place])
        & (expected[row, place] != NO_TAG)
        & (slot % size == position % size)
        & own[batch.slots[row], place.clamp(max=own.shape[1] - 1)]
    )
    far = torch.full((count,), _FAR, dtype=torch.int64, device=table.device)
    written = far.scatter_reduce(0, row, torch.where(right, _FAR, position), "amin")
    at = (batch.starts[:-1] + written - batch.computed).clamp(0, max(0, batch.tokens - 1))
    wrong_length = (
        (tables.seq_lens[:count] != length)
        | (tables.query_start_loc[:count] != batch.starts[:-1])
        | (tables.query_start_loc[1 : count + 1] != batch.starts[1:])
    )
    findings = torch.zeros((count, 3), dtype=torch.int64, device=table.device)
    nowhere = torch.full_like(found, -1)
    for code, bad, where, page in (
        (Finding.WRITE, written != _FAR, written, to[at] if batch.tokens else nowhere),
        (Finding.READ, first != _FAR, first, found),
        (Finding.LENGTH, wrong_length, tables.seq_lens[:count].long(), nowhere),
    ):
        finding = torch.stack([torch.full_like(found, code), where, page], dim=1)
        findings = torch.where(bad[:, None], finding, findings)
    return findings.clamp(max=_FAR).int()


def judge_torch(
    tables: Tables, batch: Batch, rows: RowTensors, shape: GroupShape, *, contain: bool
) -> torch.Tensor:
    """As `verify_triton.check_triton`: findings, poison, and the masks if they are wanted."""
    findings = check_torch(tables, batch, rows, shape)
    known = batch.slots >= 0
    poisoned = known & (rows.poison[batch.slots] != 0) & (findings[:, 0] == Finding.NOTHING)
    findings[:, 0] = torch.where(poisoned, Finding.POISONED, findings[:, 0])
    flagged = findings[:, 0] != Finding.NOTHING
    poison = (flagged & known).to(torch.uint8)
    rows.poison.scatter_reduce_(0, batch.slots.clamp(min=0), poison, "amax")
    if contain:
        _contain_torch(tables, batch, flagged)
    return findings


def _read_range(batch: Batch, shape: GroupShape) -> tuple[torch.Tensor, torch.Tensor]:
    """First page that each row reads, and the one after the last."""
    length = (batch.computed + batch.starts[1:] - batch.starts[:-1]).long()
    end = (length + shape.block_size - 1) // shape.block_size
    if shape.window is None:
        return torch.zeros_like(end), end
    return (batch.computed - shape.window + 1).clamp(min=0).long() // shape.block_size, end


def _rows_of(token: torch.Tensor, batch: Batch) -> torch.Tensor:
    return torch.searchsorted(batch.starts[1:].long(), token, right=True)


def _padded(rows: torch.Tensor, width: int, value: int) -> torch.Tensor:
    """[n, width], with `value` on the right."""
    return torch.nn.functional.pad(rows, (0, max(0, width - rows.shape[1])), value=value)


def _tags_of(pages: torch.Tensor, page_tags: torch.Tensor) -> torch.Tensor:
    """0 for what is no page."""
    real = (pages >= 0) & (pages < page_tags.shape[0])
    return page_tags[pages.clamp(0, page_tags.shape[0] - 1)] * real


def _contain_torch(tables: Tables, batch: Batch, flagged: torch.Tensor) -> None:
    count = batch.slots.shape[0]
    tables.block_table[:count].masked_fill_(flagged[:, None], NULL_PAGE)
    length = (batch.computed + batch.starts[1:] - batch.starts[:-1]).to(tables.seq_lens.dtype)
    tables.seq_lens[:count] = torch.where(flagged, length, tables.seq_lens[:count])
    token = torch.arange(batch.tokens, device=flagged.device)
    row = _rows_of(token, batch)
    tables.slot_mapping[: batch.tokens].masked_fill_(flagged[row][: tables.slot_mapping.shape[0]], NO_SLOT)
