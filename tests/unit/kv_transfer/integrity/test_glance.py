"""A glance passes exactly the steps in which the whole check finds nothing."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.glance import Glance
from kv_transfer.integrity.verify import check_numpy
from tests.support.mischief import MISCHIEF, WINDOWS, mischievous
from tests.support.step_world import Step, a_step, step_after


def agree(glance: Glance, step: Step) -> bool:
    glance.look(step.batch)
    passed = glance.passes(step.tables)
    findings = check_numpy(step.tables, step.batch, step.shadow.rows[0], step.shape)
    assert passed == (not findings.any()), findings.tolist()
    return passed


@pytest.mark.timeout(90)
@settings(max_examples=80)
@given(st.integers(0, 10**9), st.integers(0, 3))
def test_a_glance_passes_what_the_whole_check_passes(seed: int, acts: int) -> None:
    step = mischievous(seed, acts)

    agree(Glance(step.shadow.rows[0], step.shape), step)


@pytest.mark.timeout(90)
@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_what_a_glance_keeps_from_step_to_step_is_never_behind(seed: int) -> None:
    rnd = random.Random(seed)
    step = a_step(rnd, window=rnd.choice(WINDOWS))
    glance = Glance(step.shadow.rows[0], step.shape)
    assert agree(glance, step)
    for _ in range(12):
        step = step_after(rnd, step)
        agree(glance, step)
        if rnd.random() < 0.3:
            rnd.choice(MISCHIEF)(step, rnd)
            agree(glance, step)


@pytest.mark.parametrize("window", WINDOWS)
def test_right_steps_one_after_another_are_passed(window: int | None) -> None:
    rnd = random.Random(9)
    step = a_step(rnd, window=window)
    glance = Glance(step.shadow.rows[0], step.shape)
    for _ in range(30):
        assert agree(glance, step)
        step = step_after(rnd, step)


def a_looked_at_decode_step() -> tuple[Glance, Step]:
    rnd = random.Random(2)
    step = a_step(rnd)
    while not (np.diff(step.batch.starts) == 1).all():
        step = step_after(rnd, step)
    glance = Glance(step.shadow.rows[0], step.shape)
    assert agree(glance, step)
    return glance, step


def test_a_page_that_nothing_may_be_read_from_equals_no_entry() -> None:
    """`STALE` is -1; a table that shows -1 there is as wrong as any other."""
    glance, step = a_looked_at_decode_step()
    shown = step.tables.block_table[: len(step.names)]
    ends = -(-step.tables.seq_lens[: len(step.names)] // step.shape.block_size)
    page = int(shown[int(ends.argmax()), 0])
    assert ends.max() > 1, "not the page that is written to"
    step.shadow.apply(LedgerDelta(tags={page: 9_999_999}))
    shown[shown == page] = -1

    assert not agree(glance, step)


def test_a_page_that_is_not_ones_own_any_more_is_not_written_to() -> None:
    glance, step = a_looked_at_decode_step()
    rows = step.shadow.rows[0]
    rows.own[:] = False
    rows.change(int(step.batch.slots[0]), 0, rows.pages.shape[1])

    assert not agree(glance, step)
