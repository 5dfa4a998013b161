"""Each form of the check against the slow one, on right steps and on steps that something was done to."""

import os
import random
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.verify import Finding, RowTensors, Tables, check_numpy, check_torch, contain
from kv_transfer.integrity.verify_triton import check_triton
from tests.support.step_world import PAGES, Step, a_step, slow_findings


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
    step.shadow.rows[0].own[rnd.randrange(len(step.names))] = False


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


def by_numpy(step: Step) -> Any:
    return check_numpy(step.tables, step.batch, step.shadow.rows[0], step.shape)


def by_torch(step: Step) -> Any:
    tables, batch = step.tensors()
    return check_torch(tables, batch, step.rows(), step.shape).numpy()


def by_triton(step: Step) -> Any:
    tables, batch = step.tensors()
    return check_triton(tables, batch, step.rows(), step.shape, contain=False, block=4).numpy()


FORMS = {"numpy": by_numpy, "torch": by_torch}


def mischievous(seed: int, acts: int, rows: int = 6) -> Step:
    rnd = random.Random(seed)
    step = a_step(rnd, rows=rows, window=rnd.choice(WINDOWS))
    for _ in range(acts):
        rnd.choice(MISCHIEF)(step, rnd)
    return step


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("form", [*FORMS.values(), by_triton], ids=[*FORMS, "triton"])
def test_a_right_step_is_passed(form: Callable[[Step], Any], window: int | None) -> None:
    step = a_step(random.Random(1), window=window)

    assert not form(step).any()


@settings(max_examples=150)
@given(st.integers(0, 10**9), st.integers(0, 4))
def test_all_forms_find_what_a_loop_over_entries_finds(seed: int, acts: int) -> None:
    step = mischievous(seed, acts)
    slow = slow_findings(step).tolist()

    for name, form in FORMS.items():
        assert form(step).tolist() == slow, name


@settings(max_examples=12)
@given(st.integers(0, 10**9), st.integers(0, 3))
def test_the_kernel_finds_it_too(seed: int, acts: int) -> None:
    step = mischievous(seed, acts, rows=2)

    assert by_triton(step).tolist() == slow_findings(step).tolist()


@pytest.mark.parametrize("mischief", MISCHIEF, ids=lambda m: m.__name__)
def test_every_kind_of_mischief_is_noticed_by_some_row(mischief: Callable[..., None]) -> None:
    """The generator is worth something: of each kind there are cases that are wrong."""
    found = []
    for seed in range(40):
        step = a_step(random.Random(seed))
        mischief(step, random.Random(seed))
        found.append(bool(by_numpy(step).any()))

    assert any(found)


@pytest.mark.parametrize("window", WINDOWS)
def test_what_lies_beyond_the_read_range_is_ignored(window: int | None) -> None:
    step = a_step(random.Random(3), window=window)
    size = step.shape.block_size
    for row, computed in enumerate(step.batch.computed.tolist()):
        end = -(-int(step.tables.seq_lens[row]) // size)
        step.tables.block_table[row, end:] = 77
        step.tables.block_table[row, : step.shape.first_page(computed)] = 77
    step.tables.slot_mapping[step.batch.tokens :] = 77

    for form in FORMS.values():
        assert not form(step).any()


@pytest.mark.parametrize("shown", [0, -1])
@pytest.mark.parametrize("form", [*FORMS.values(), by_triton], ids=[*FORMS, "triton"])
def test_the_null_page_is_wrong_wherever_attention_looks(form: Callable[[Step], Any], shown: int) -> None:
    step = a_step(random.Random(5), window=5)
    row = int(step.batch.computed.argmax())
    first = step.shape.first_page(int(step.batch.computed[row]))
    assert first > 0
    assert step.tables.block_table[row, first - 1] == 0

    step.tables.block_table[row, first] = shown
    step.shadow.rows[0].clear(int(step.batch.slots[row]), first, first + 1)

    assert form(step)[row].tolist() == [Finding.READ, first, shown]


@pytest.mark.parametrize("form", [*FORMS.values(), by_triton], ids=[*FORMS, "triton"])
def test_a_request_without_a_row_has_no_other_requests_row(form: Callable[[Step], Any]) -> None:
    """Slot -1 is the last row in Python's and numpy's eyes."""
    step = a_step(random.Random(2), rows=4)
    assert step.shadow.rows[0].pages.shape[0] == 4
    last = int(step.batch.slots.argmax())

    step.batch.slots[last] = -1

    assert np.flatnonzero(form(step)[:, 0]).tolist() == [last]


@pytest.mark.parametrize("form", [*FORMS.values(), by_triton], ids=[*FORMS, "triton"])
def test_a_write_to_the_right_page_at_the_wrong_offset_is_found(form: Callable[[Step], Any]) -> None:
    step = a_step(random.Random(4))
    size = step.shape.block_size
    position = int(step.batch.computed[0])
    step.tables.slot_mapping[0] += 1 if position % size < size - 1 else -1

    assert form(step)[0].tolist() == [Finding.WRITE, position, step.tables.slot_mapping[0] // size]


@settings(max_examples=30)
@given(st.integers(0, 10**9), st.integers(0, 3))
@example(seed=0, acts=0)
def test_containment_takes_flagged_rows_out_and_leaves_the_others(seed: int, acts: int) -> None:
    step = mischievous(seed, acts, rows=3)
    tables, batch = step.tensors()
    before = [t.clone() for t in (tables.block_table, tables.seq_lens, tables.slot_mapping)]
    flagged = torch.from_numpy(slow_findings(step)[:, 0] != 0)
    contain(tables, batch, flagged)
    contain(step.tables, step.batch, flagged.numpy())

    assert step.tables.block_table.tolist() == tables.block_table.tolist()
    assert step.tables.seq_lens.tolist() == tables.seq_lens.tolist()
    assert step.tables.slot_mapping.tolist() == tables.slot_mapping.tolist()
    starts = batch.starts.tolist()
    for row, bad in enumerate(flagged.tolist()):
        tokens = slice(starts[row], starts[row + 1])
        if bad:
            assert not tables.block_table[row].any()
            assert (tables.slot_mapping[tokens] == -1).all()
        else:
            assert tables.block_table[row].equal(before[0][row])
            assert tables.seq_lens[row] == before[1][row]
            assert tables.slot_mapping[tokens].equal(before[2][tokens])
    assert tables.block_table[3:].equal(before[0][3:])
    assert tables.slot_mapping[batch.tokens :].equal(before[2][batch.tokens :])


@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_contains_as_the_others_do(seed: int) -> None:
    step = mischievous(seed, 2, rows=3)
    tables, batch = step.tensors()
    check_triton(tables, batch, step.rows(), step.shape, contain=True, block=4)
    contain(step.tables, step.batch, slow_findings(step)[:, 0] != 0)

    assert tables.block_table.tolist() == step.tables.block_table.tolist()
    assert tables.seq_lens.tolist() == step.tables.seq_lens.tolist()
    assert tables.slot_mapping.tolist() == step.tables.slot_mapping.tolist()


class Waits(TorchDispatchMode):
    """Records operations for whose result the host would have to wait for a device."""

    NAMES = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "item",
        "is_nonzero",
        "_to_copy.cpu",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        to_host = "_to_copy" in name and (kwargs or {}).get("device") == torch.device("cpu")
        by_mask = "index.Tensor" in name and any(t is not None and t.dtype == torch.bool for t in args[1])
        if to_host or by_mask or any(word in name for word in self.NAMES):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_nothing_in_the_device_forms_waits_for_the_device() -> None:
    step = mischievous(7, 3)
    tables, batch = step.tensors()
    rows = step.rows()
    with Waits() as waits:
        findings = check_torch(tables, batch, rows, step.shape)
        contain(tables, batch, findings[:, 0] != 0)
        assert waits.seen == []
        bool(findings.any())
        findings[findings[:, 0] != 0]
    assert len(waits.seen) == 2, "the recorder sees such operations"


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_finds_and_contains_what_the_loop_finds() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set: the kernel would not run on the GPU")
    for seed in range(60):
        step = mischievous(seed, seed % 4, rows=6)
        tables, batch = step.tensors()
        rows = step.rows()
        on_device = RowTensors(*(t.cuda() for t in (rows.page_tags, rows.tags, rows.pages, rows.own)))
        on = [t.cuda() for t in (tables.block_table, tables.seq_lens, tables.query_start_loc)]
        on_gpu = Tables(*on, tables.slot_mapping.cuda())
        cuda_batch = type(batch)(batch.slots.cuda(), batch.computed.cuda(), batch.starts.cuda(), batch.tokens)
        slow = slow_findings(step)
        findings = check_triton(on_gpu, cuda_batch, on_device, step.shape, contain=True)
        contain(step.tables, step.batch, slow[:, 0] != 0)

        assert findings.cpu().tolist() == slow.tolist()
        assert on_gpu.block_table.cpu().tolist() == step.tables.block_table.tolist()
        assert on_gpu.slot_mapping.cpu().tolist() == step.tables.slot_mapping.tolist()
