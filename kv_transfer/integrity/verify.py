"""The check before each forward: what attention is about to read and write, against the shadow.

Three forms with one meaning, kept equal by tests:

    check_numpy    compares tables with the shadow; used on CPU
    check_torch    gathers tags through the tables, and compares those: the reference, on any device
    check_triton   as `check_numpy`, one program a row, on CUDA (`verify_triton.py`)

None of them waits for the device. The answer is `findings`, int32 [rows, 3]: what is wrong with each row
first (`Finding`), where, and the page that was found there.

    LENGTH   the row's sequence length, or its place in the batch, is not the expected one; where: the length
    READ     where: logical index of the first page in the read range that is not the request's
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
    starts = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(scheduled, out=starts[1:])
    return Batch(np.array(slots, np.int64), np.array(computed, np.int32), starts, int(starts[-1]))


def check_numpy(tables: Tables, batch: Batch, rows: GroupRows, shape: GroupShape) -> Int32s:
    """Findings, of arrays."""
    count = len(batch.slots)
    size = shape.block_size
    findings = np.zeros((count, 3), np.int32)
    if count == 0:
        return findings
    length = batch.computed + np.diff(batch.starts)
    end = -(-length // size)
    width = int(end.max())
    pages = _expected_pages(rows, batch.slots, width)
    first, found = _first_wrong_read(tables.block_table[:count, :width], pages, batch, end, shape)
    wrong_length = (
        (tables.seq_lens[:count] != length)
        | (tables.query_start_loc[:count] != batch.starts[:-1])
        | (tables.query_start_loc[1 : count + 1] != batch.starts[1:])
    )
    position, written = _first_wrong_write(tables.slot_mapping, batch, pages, rows.own, size)
    for code, wrong, where, page in (
        (Finding.WRITE, position != _FAR, position, written),
        (Finding.READ, first != _FAR, first, found),
        (Finding.LENGTH, wrong_length, tables.seq_lens[:count], np.full(count, -1, np.int32)),
    ):
        if wrong.any():
            findings[wrong] = np.stack([np.full(count, code), where, page], axis=1)[wrong]
    return findings


def _expected_pages(rows: GroupRows, slots: Int64s, width: int) -> Int32s:
    """[rows, width]; nothing for a request that has no row, or not so many pages."""
    known = rows.pages[slots, :width]
    if known.shape[1] < width:
        known = np.pad(known, ((0, 0), (0, width - known.shape[1])), constant_values=STALE)
    if (slots < 0).any():
        known[slots < 0] = STALE
    return known


def _first_wrong_read(
    table: Int32s, pages: Int32s, batch: Batch, end: Int32s, shape: GroupShape
) -> tuple[Int32s, Int32s]:
    """By row: logical index of the first wrong page (`_FAR`: none), and the page that was found there."""
    count, width = pages.shape
    if table.shape[1] < width:
        table = np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=-1)
    wrong = table != pages
    wrong |= pages < 0
    first = np.full(count, _FAR, np.int32)
    found = np.full(count, -1, np.int32)
    index = np.arange(width)
    wrong &= index < end[:, None]
    if shape.window is not None:
        begin = np.maximum(0, batch.computed - shape.window + 1) // shape.block_size
        wrong &= index >= begin[:, None]
    flagged = wrong.any(axis=1)
    if flagged.any():
        first[flagged] = wrong[flagged].argmax(axis=1)
        found[flagged] = table[flagged, first[flagged]]
    return first, found


def _first_wrong_write(
    slot_mapping: Int64s, batch: Batch, pages: Int32s, own: Bools, size: int
) -> tuple[Int32s, Int32s]:
    """By row: position of the first token that is written wrongly (`_FAR`: none), and the page it went to."""
    count, tokens = len(batch.slots), batch.tokens
    scheduled = np.diff(batch.starts)
    row = np.repeat(np.arange(count), scheduled)
    position = np.arange(tokens) - np.repeat(batch.starts[:-1] - batch.computed, scheduled)
    index = position // size
    page = pages[row, index]
    slot = _first(slot_mapping, tokens)
    # A page that nothing may be written to is found as a wrong read already.
    wrong = slot != page.astype(np.int64) * size + position % size
    wrong |= ~own[batch.slots[row], np.minimum(index, own.shape[1] - 1)]
    first = np.full(count, _FAR, np.int32)
    written = np.full(count, -1, np.int32)
    for token in np.flatnonzero(wrong)[::-1]:
        first[row[token]] = position[token]
        written[row[token]] = min(slot[token] // size, _FAR) if slot[token] >= 0 else -1
    return first, written


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
