"""What may be wrong with a step: tables, slots and lengths that no right scheduler and runner would give."""

import random
from collections.abc import Callable

import numpy as np

from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.verify import Tables
from tests.support.step_world import PAGES, Step, a_step


def a_page(step: Step, rnd: random.Random) -> int:
    return rnd.choice([p for p in step.tables.block_table.ravel().tolist() if 0 < p < PAGES])


def flip_an_entry(step: Step, rnd: random.Random) -> None:
    table = step.tables.block_table
    row, column = rnd.randrange(table.shape[0]), rnd.randrange(table.shape[1])
    table[row, column] = rnd.choice([0, -1, -7, PAGES, 2**31 - 1, -(2**31), rnd.randrange(PAGES)])


def shift_a_row(step: Step, rnd: random.Random) -> None:
    row = rnd.randrange(step.tables.block_table.shape[0])
    step.tables.block_table[row] = np.roll(step.tables.block_table[row], rnd.choice([1, -1]))


def swap_two_rows(step: Step, rnd: random.Random) -> None:
    a, b = rnd.sample(range(step.tables.block_table.shape[0]), 2)
    step.tables.block_table[[a, b]] = step.tables.block_table[[b, a]]


def retag_a_page(step: Step, rnd: random.Random) -> None:
    step.shadow.apply(LedgerDelta(tags={a_page(step, rnd): 5_000_000 + rnd.randrange(1000)}))


def revoke_a_page(step: Step, rnd: random.Random) -> None:
    step.shadow.revoke([a_page(step, rnd)])


def write_elsewhere(step: Step, rnd: random.Random) -> None:
    slots = step.tables.slot_mapping
    slots[rnd.randrange(len(slots))] = rnd.choice(
        [-1, 0, 2**40, -(2**40), rnd.randrange(PAGES * 4), int(slots[0])]
    )


def write_beside(step: Step, rnd: random.Random) -> None:
    step.tables.slot_mapping[rnd.randrange(len(step.tables.slot_mapping))] += rnd.choice([1, -1])


def write_to_a_shared_page(step: Step, rnd: random.Random) -> None:
    slot = rnd.randrange(len(step.names))
    step.shadow.rows[0].own[slot] = False
    step.shadow.rows[0].change(slot, 0, step.shadow.rows[0].pages.shape[1])


def change_a_length(step: Step, rnd: random.Random) -> None:
    step.tables.seq_lens[rnd.randrange(len(step.tables.seq_lens))] += rnd.choice([1, -1, 400, -(2**30)])


def move_a_boundary(step: Step, rnd: random.Random) -> None:
    step.tables.query_start_loc[rnd.randrange(len(step.tables.query_start_loc))] += rnd.choice([1, -1, 5])


def forget_a_request(step: Step, rnd: random.Random) -> None:
    step.batch.slots[rnd.randrange(len(step.batch.slots))] = -1


def forget_the_end_of_rows(step: Step, rnd: random.Random) -> None:
    step.shadow.rows[0].clear(step.batch.slots[0], rnd.randrange(1, 4))


def cut_the_tables(step: Step, rnd: random.Random) -> None:
    t = step.tables
    table = t.block_table[:, : rnd.randrange(1, 4)].copy()
    step.tables = Tables(table, t.seq_lens, t.query_start_loc, t.slot_mapping[: rnd.randrange(1, 6)].copy())


MISCHIEF: tuple[Callable[[Step, random.Random], None], ...] = (
    *(flip_an_entry, shift_a_row, swap_two_rows, retag_a_page, revoke_a_page, write_elsewhere),
    *(write_to_a_shared_page, change_a_length, move_a_boundary, forget_a_request, forget_the_end_of_rows),
    *(cut_the_tables, write_beside),
)
WINDOWS = (None, 1, 5, 8)


def mischievous(seed: int, acts: int, rows: int = 6) -> Step:
    rnd = random.Random(seed)
    step = a_step(rnd, rows=rows, window=rnd.choice(WINDOWS))
    for _ in range(acts):
        rnd.choice(MISCHIEF)(step, rnd)
    return step
