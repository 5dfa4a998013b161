"""The Triton kernel against the loop over entries. Run by `test_kernels.py`, in a process that imports
Triton with `TRITON_INTERPRET=1`, or on a GPU."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.integrity.verify import Finding, RowTensors, Tables, contain, judge_torch
from kv_transfer.integrity.verify_triton import check_triton
from tests.support.mischief import WINDOWS, mischievous
from tests.support.step_world import Step, a_step, slow_findings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")


def by_triton(step: Step) -> np.ndarray:
    tables, batch = step.tensors()
    return check_triton(tables, batch, step.rows(), step.shape, contain=False, block=4).numpy()


@interpreted
@pytest.mark.parametrize("window", WINDOWS)
def test_a_right_step_is_passed(window: int | None) -> None:
    assert not by_triton(a_step(random.Random(1), window=window)).any()


@interpreted
@settings(max_examples=12)
@given(st.integers(0, 10**9), st.integers(0, 3))
def test_the_kernel_finds_it_too(seed: int, acts: int) -> None:
    step = mischievous(seed, acts, rows=2)

    assert by_triton(step).tolist() == slow_findings(step).tolist()


@interpreted
@pytest.mark.parametrize("shown", [0, -1])
def test_the_null_page_is_wrong_wherever_attention_looks(shown: int) -> None:
    step = a_step(random.Random(5), window=5)
    row = int(step.batch.computed.argmax())
    first = step.shape.first_page(int(step.batch.computed[row]))
    step.tables.block_table[row, first] = shown
    step.shadow.rows[0].clear(int(step.batch.slots[row]), first, first + 1)

    assert by_triton(step)[row].tolist() == [Finding.READ, first, shown]


@interpreted
def test_a_request_without_a_row_has_no_other_requests_row() -> None:
    step = a_step(random.Random(2), rows=4)
    step.batch.slots[0] = -1

    assert np.flatnonzero(by_triton(step)[:, 0]).tolist() == [0]


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_the_kernel_contains_as_the_others_do(seed: int) -> None:
    step = mischievous(seed, 2, rows=3)
    tables, batch = step.tensors()
    check_triton(tables, batch, step.rows(), step.shape, contain=True, block=4)
    contain(step.tables, step.batch, slow_findings(step)[:, 0] != 0)

    assert tables.block_table.tolist() == step.tables.block_table.tolist()
    assert tables.seq_lens.tolist() == step.tables.seq_lens.tolist()
    assert tables.slot_mapping.tolist() == step.tables.slot_mapping.tolist()


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_who_is_poisoned_is_flagged_and_who_is_flagged_is_poisoned(seed: int) -> None:
    step = mischievous(seed, 2, rows=4)
    (tables, batch), (theirs, _) = step.tensors(), step.tensors()
    rows, expected = step.rows(), step.rows()
    for poison in (rows.poison, expected.poison):
        poison[int(batch.slots[1])] = 1
    by_torch = judge_torch(theirs, batch, expected, step.shape, contain=True)
    found = check_triton(tables, batch, rows, step.shape, contain=True, block=4)

    assert found.tolist() == by_torch.tolist()
    assert found[1, 0] != Finding.NOTHING
    assert rows.poison.tolist() == expected.poison.tolist()
    assert set(rows.poison.nonzero()[:, 0].tolist()) == {*batch.slots[found[:, 0] != 0].tolist()} - {-1}
    assert tables.block_table.tolist() == theirs.block_table.tolist()
    assert tables.slot_mapping.tolist() == theirs.slot_mapping.tolist()


@pytest.mark.gpu
def test_the_kernel_on_a_gpu_finds_and_contains_what_the_loop_finds() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is set: the kernel would not run on the GPU")
    for seed in range(60):
        step = mischievous(seed, seed % 4, rows=6)
        tables, batch = step.tensors()
        rows = step.rows()
        on_device = RowTensors(
            *(t.cuda() for t in (rows.page_tags, rows.tags, rows.pages, rows.own, rows.poison))
        )
        on = [t.cuda() for t in (tables.block_table, tables.seq_lens, tables.query_start_loc)]
        on_gpu = Tables(*on, tables.slot_mapping.cuda())
        cuda_batch = type(batch)(batch.slots.cuda(), batch.computed.cuda(), batch.starts.cuda(), batch.tokens)
        slow = slow_findings(step)
        findings = check_triton(on_gpu, cuda_batch, on_device, step.shape, contain=True)
        contain(step.tables, step.batch, slow[:, 0] != 0)

        assert findings.cpu().tolist() == slow.tolist()
        assert on_gpu.block_table.cpu().tolist() == step.tables.block_table.tolist()
        assert on_gpu.slot_mapping.cpu().tolist() == step.tables.slot_mapping.tolist()
