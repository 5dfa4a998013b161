"""Steps as kernels see them: right ones, and what can be wrong with them."""

import random
from dataclasses import dataclass

import numpy as np
import torch

from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.shadow import GroupShape, Int32s, Shadow
from kv_transfer.integrity.tags import NO_TAG
from kv_transfer.integrity.verify import Batch, Finding, RowTensors, Tables, batch_of

PAGES = 200


@dataclass
class Step:
    """One group, arrays throughout."""

    shadow: Shadow
    shape: GroupShape
    tables: Tables
    batch: Batch
    names: list[str]

    def tensors(self) -> tuple[Tables, Batch]:
        """Copies, as tensors."""
        t, b = self.tables, self.batch
        arrays = (t.block_table, t.seq_lens, t.query_start_loc, t.slot_mapping, b.slots, b.computed, b.starts)
        copied = [torch.from_numpy(a.copy()) for a in arrays]
        return Tables(*copied[:4]), Batch(*copied[4:], tokens=b.tokens)

    def rows(self) -> RowTensors:
        """The shadow's rows; copies."""
        rows = self.shadow.rows[0]
        arrays = (self.shadow.tags, rows.tags, rows.pages, rows.own)
        poison = torch.zeros(len(rows.pages), dtype=torch.uint8)
        return RowTensors(*(torch.from_numpy(a.copy()) for a in arrays), poison)


def a_step(rnd: random.Random, *, rows: int = 6, window: int | None = None, size: int = 4) -> Step:
    """Requests of random lengths: some in prefill, some with shared pages before their own."""
    shape = GroupShape(size, window)
    shadow = Shadow(PAGES, [shape], rows=2, width=2)
    shadow.apply(LedgerDelta(tags={page: 1000 + 7 * page for page in range(PAGES)}))
    fresh = rnd.sample(range(1, PAGES), PAGES - 1)
    names = [f"r{i}" for i in range(rows)]
    shared = [fresh.pop() for _ in range(3)]
    computed, scheduled, tables = [], [], []
    for name in names:
        hit = rnd.choice([0, 0, 2, 3])
        computed.append(hit * size + rnd.randrange(0, 4 * size))
        scheduled.append(rnd.choice([1, 1, rnd.randrange(1, 3 * size)]))
        count = -(-(computed[-1] + scheduled[-1]) // size)
        first = shape.first_page(computed[-1])
        pages = [shared[i] if i < hit else fresh.pop() for i in range(count)]
        pages = [0 if i < first else page for i, page in enumerate(pages)]
        tags = [int(shadow.tags[page]) if page else NO_TAG for page in pages]
        own = [i >= hit and page != 0 for i, page in enumerate(pages)]
        shadow.apply(LedgerDelta(grown=[RowGrowth(name, 0, 0, pages, tags, own)]))
        tables.append(pages)
    return _as_kernels_see_it(rnd, shadow, shape, names, computed, scheduled, tables)


def _as_kernels_see_it(
    rnd: random.Random,
    shadow: Shadow,
    shape: GroupShape,
    names: list[str],
    computed: list[int],
    scheduled: list[int],
    pages: list[list[int]],
) -> Step:
    """With padding: rows and columns of garbage, and slots of nobody."""
    rows, width = len(names) + 2, max(map(len, pages)) + 3
    table = np.array([[rnd.randrange(PAGES) for _ in range(width)] for _ in range(rows)], np.int32)
    slots = []
    for i, row in enumerate(pages):
        table[i, : len(row)] = row
        for position in range(computed[i], computed[i] + scheduled[i]):
            slots.append(row[position // shape.block_size] * shape.block_size + position % shape.block_size)
    lengths = [c + s for c, s in zip(computed, scheduled, strict=True)] + [77, 99]
    starts = np.concatenate([[0], np.cumsum(scheduled), [9999, 9999]]).astype(np.int32)
    tables = Tables(table, np.array(lengths, np.int32), starts, np.array([*slots, -1, 12, 5], np.int64))
    return Step(shadow, shape, tables, batch_of([shadow.slot(n) for n in names], computed, scheduled), names)


def step_after(rnd: random.Random, step: Step) -> Step:
    """A right step of the same shadow: some of the requests, in another order or not, each further."""
    size, rows = step.shape.block_size, step.shadow.rows[0]
    lengths = dict(zip(step.names, (step.batch.computed + np.diff(step.batch.starts)).tolist(), strict=True))
    names = rnd.choice(
        [step.names, step.names, rnd.sample(step.names, rnd.randrange(1, len(step.names) + 1))]
    )
    scheduled = [rnd.choice([1, 1, 1, size + 1]) for _ in names]
    fresh = [page for page in range(1, PAGES) if not (rows.given == page).any()]
    tables = []
    for name, count in zip(names, scheduled, strict=True):
        slot, have = step.shadow.slot(name), -(-lengths[name] // size)
        more = [fresh.pop() for _ in range(-(-(lengths[name] + count) // size) - have)]
        tags = [int(step.shadow.tags[page]) for page in more]
        if more:
            growth = RowGrowth(name, 0, have, more, tags, [True] * len(more))
            step.shadow.apply(LedgerDelta(grown=[growth]))
        tables.append(np.maximum(rows.given[slot, : have + len(more)], 0).tolist())
    computed = [lengths[name] for name in names]
    return _as_kernels_see_it(rnd, step.shadow, step.shape, names, computed, scheduled, tables)


def slow_findings(step: Step) -> Int32s:
    """The same as `check_numpy`, entry by entry."""
    size, tables, rows = step.shape.block_size, step.tables, step.shadow.rows[0]
    findings = []
    for i in range(len(step.batch.slots)):
        slot, computed = int(step.batch.slots[i]), int(step.batch.computed[i])
        start, stop = int(step.batch.starts[i]), int(step.batch.starts[i + 1])
        length = computed + stop - start

        def given(index: int, slot: int = slot) -> int:
            """The page that lies there rightly, or -1."""
            if slot < 0 or index >= rows.given.shape[1] or rows.tags[slot, index] == NO_TAG:
                return -1
            page = int(rows.given[slot, index])
            return page if step.shadow.tags[page] == rows.tags[slot, index] else -1

        def shown(index: int, i: int = i) -> int:
            return int(tables.block_table[i, index]) if index < tables.block_table.shape[1] else -1

        def slot_of(token: int) -> int:
            return int(tables.slot_mapping[token]) if token < len(tables.slot_mapping) else -1

        places = (int(tables.seq_lens[i]), *map(int, tables.query_start_loc[i : i + 2]))
        if places != (length, start, stop):
            findings.append((Finding.LENGTH, places[0], -1))
            continue
        reads = range(step.shape.first_page(computed), -(-length // size))
        wrong = [index for index in reads if given(index) < 0 or shown(index) != given(index)]
        if wrong:
            findings.append((Finding.READ, wrong[0], shown(wrong[0])))
            continue
        finding = (Finding.NOTHING, 0, 0)
        for token in range(start, stop):
            position = computed + token - start
            index = position // size
            right = given(index) * size + position % size
            if given(index) < 0 or not rows.own[slot, index] or slot_of(token) != right:
                page = min(slot_of(token) // size, 2**31 - 1) if slot_of(token) >= 0 else -1
                finding = (Finding.WRITE, position, page)
                break
        findings.append(finding)
    return np.array(findings, np.int32).reshape(-1, 3)
