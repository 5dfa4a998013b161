"""Each form of the check against the slow one, on right steps and on steps that something was done to."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kv_transfer.integrity.verify import Finding, check_numpy, check_torch, contain
from tests.support.mischief import MISCHIEF, WINDOWS, mischievous
from tests.support.step_world import Step, a_step, slow_findings


def by_numpy(step: Step) -> Any:
    return check_numpy(step.tables, step.batch, step.shadow.rows[0], step.shape)


def by_torch(step: Step) -> Any:
    tables, batch = step.tensors()
    return check_torch(tables, batch, step.rows(), step.shape).numpy()


FORMS = {"numpy": by_numpy, "torch": by_torch}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_right_step_is_passed(form: Callable[[Step], Any], window: int | None) -> None:
    step = a_step(random.Random(1), window=window)

    assert not form(step).any()


@pytest.mark.timeout(90)
@settings(max_examples=80)
@given(st.integers(0, 10**9), st.integers(0, 4))
def test_all_forms_find_what_a_loop_over_entries_finds(seed: int, acts: int) -> None:
    step = mischievous(seed, acts)
    slow = slow_findings(step).tolist()

    for name, form in FORMS.items():
        assert form(step).tolist() == slow, name


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
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_null_page_is_wrong_wherever_attention_looks(form: Callable[[Step], Any], shown: int) -> None:
    step = a_step(random.Random(5), window=5)
    row = int(step.batch.computed.argmax())
    first = step.shape.first_page(int(step.batch.computed[row]))
    assert first > 0
    assert step.tables.block_table[row, first - 1] == 0

    step.tables.block_table[row, first] = shown
    step.shadow.rows[0].clear(int(step.batch.slots[row]), first, first + 1)

    assert form(step)[row].tolist() == [Finding.READ, first, shown]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_request_without_a_row_has_no_other_requests_row(form: Callable[[Step], Any]) -> None:
    """Slot -1 is the last row in Python's and numpy's eyes."""
    step = a_step(random.Random(2), rows=4)
    assert step.shadow.rows[0].pages.shape[0] == 4
    last = int(step.batch.slots.argmax())

    step.batch.slots[last] = -1

    assert np.flatnonzero(form(step)[:, 0]).tolist() == [last]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_write_to_the_right_page_at_the_wrong_offset_is_found(form: Callable[[Step], Any]) -> None:
    step = a_step(random.Random(4))
    size = step.shape.block_size
    position = int(step.batch.computed[0])
    step.tables.slot_mapping[0] += 1 if position % size < size - 1 else -1

    assert form(step)[0].tolist() == [Finding.WRITE, position, step.tables.slot_mapping[0] // size]


@pytest.mark.timeout(90)
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


@pytest.mark.timeout(90)
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
