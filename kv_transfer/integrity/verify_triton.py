"""The check on CUDA: one program a row, and nothing waits for it.

As `verify.check_numpy` and `verify.contain` in one: findings are written, and what a flagged row would read
and write is masked before any attention kernel runs. Under `TRITON_INTERPRET=1` it runs on CPU, for tests.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Batch, RowTensors, Tables

_BLOCK: Final = 1024


def check_triton(
    tables: Tables,
    batch: Batch,
    rows: RowTensors,
    shape: GroupShape,
    *,
    contain: bool,
    block: int = _BLOCK,
) -> torch.Tensor:
    """Findings, int32 [rows, 3]. Rows with a finding are poisoned: they have one in every later step, too.

    Args:
        contain: mask what flagged rows would read and write, in place.
        block: pages or tokens compared at once; a power of two.
    """
    count = batch.slots.shape[0]
    findings = torch.zeros((count, 3), dtype=torch.int32, device=tables.block_table.device)
    if count:
        _check_row[(count,)](
            tables.block_table,
            tables.block_table.stride(0),
            tables.block_table.shape[1],
            tables.seq_lens,
            tables.query_start_loc,
            tables.slot_mapping,
            tables.slot_mapping.shape[0],
            batch.slots,
            batch.computed,
            batch.starts,
            rows.pages,
            rows.own.view(torch.uint8),
            rows.poison,
            rows.pages.stride(0),
            rows.pages.shape[1],
            findings,
            shape.block_size,
            -1 if shape.window is None else shape.window,
            CONTAIN=contain,
            BLOCK=block,
        )
    return findings


@triton.jit
def _check_row(  # noqa: PLR0915, PLR0917
    table,
    table_stride,
    table_width,
    seq_lens,
    query_start_loc,
    slot_mapping,
    slot_count,
    slots,
    computed,
    starts,
    pages,
    own,
    poison,
    pages_stride,
    pages_width,
    findings,
    size,
    window,
    CONTAIN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    far = 2147483647
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    known_width = tl.where(slot >= 0, pages_width, 0)
    shadow = tl.maximum(slot, 0) * pages_stride
    before = tl.load(computed + row)
    start = tl.load(starts + row)
    tokens = tl.load(starts + row + 1) - start
    length = before + tokens
    seq_len = tl.load(seq_lens + row)
    wrong_length = (
        (seq_len != length)
        | (tl.load(query_start_loc + row) != start)
        | (tl.load(query_start_loc + row + 1) != start + tokens)
    )
    lane = tl.arange(0, BLOCK)

    # reads
    begin = tl.where(window < 0, 0, tl.maximum(0, before - window + 1) // size)
    end = (length + size - 1) // size
    first = tl.full((), far, tl.int32)
    for base in range(begin, end, BLOCK):
        index = base + lane
        inside = index < end
        shown = tl.load(table + row * table_stride + index, mask=inside & (index < table_width), other=-1)
        given = tl.load(pages + shadow + index, mask=inside & (index < known_width), other=-1)
        wrong = inside & ((shown != given) | (given < 0))
        first = tl.minimum(first, tl.min(tl.where(wrong, index, far), 0))
    found = tl.load(table + row * table_stride + first, mask=first < table_width, other=-1)

    # writes
    position = tl.full((), far, tl.int32)
    for base in range(0, tokens, BLOCK):
        token = base + lane
        inside = token < tokens
        at = before + token
        place = at // size
        mine = inside & (place < known_width)
        given = tl.load(pages + shadow + place, mask=mine, other=-1)
        owned = tl.load(own + shadow + place, mask=mine, other=0)
        to = tl.load(slot_mapping + start + token, mask=inside & (start + token < slot_count), other=-1)
        right = (given >= 0) & (owned != 0) & (to == given.to(tl.int64) * size + at % size)
        position = tl.minimum(position, tl.min(tl.where(inside & (right == 0), at, far), 0))
    last = start + position - before
    last = tl.where(position != far, last, slot_count)
    written = tl.load(slot_mapping + last, mask=last < slot_count, other=-1)
    written_page = tl.where(written >= 0, tl.minimum(written // size, far), -1)

    known = slot >= 0
    poisoned = tl.load(poison + slot, mask=known, other=0) != 0
    code = tl.where(first != far, 2, tl.where(position != far, 3, tl.where(poisoned, 4, 0)))
    code = tl.where(wrong_length, 1, code)
    tl.store(poison + slot, tl.full((), 1, tl.uint8), mask=known & (code != 0))
    where = tl.where(code == 1, seq_len, tl.where(code == 2, first, tl.where(code == 3, position, 0)))
    page = tl.where(code == 1, -1, tl.where(code == 2, found, tl.where(code == 3, written_page, 0)))
    tl.store(findings + row * 3, code)
    tl.store(findings + row * 3 + 1, where)
    tl.store(findings + row * 3 + 2, page.to(tl.int32))

    if CONTAIN:
        tl.store(seq_lens + row, tl.where(code != 0, length, seq_len))
        masked_width = tl.where(code != 0, table_width, 0)
        masked_tokens = tl.where(code != 0, tl.minimum(tokens, slot_count - start), 0)
        for base in range(0, masked_width, BLOCK):
            index = base + lane
            null = tl.zeros([BLOCK], tl.int32)
            tl.store(table + row * table_stride + index, null, mask=index < masked_width)
        for base in range(0, masked_tokens, BLOCK):
            token = base + lane
            nowhere = tl.full([BLOCK], -1, tl.int64)
            tl.store(slot_mapping + start + token, nowhere, mask=token < masked_tokens)
