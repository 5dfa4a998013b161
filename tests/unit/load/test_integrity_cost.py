import json
from argparse import Namespace
from dataclasses import asdict
from io import BytesIO
from random import Random
from typing import Any

import pytest

from load.engine_process import EngineProcess
from load.integrity_cost import OFF, ON, STOCK, Bench, Block, Turn, objections, rows, summary


def block(arm: str, step_ms: float = 20.0, **changes: Any) -> Block:
    usual: dict[str, Any] = {
        "arm": arm,
        "step_s": (step_ms / 1000,) * 4,
        "model_s": 4 * (step_ms - (2.0 if arm == OFF else 2.1)) / 1000,
        "tokens": 4,
        "worker_s": 0.0002 if arm == ON else 0.0,
        "checked": 4 if arm == ON else 0,
        "unchecked": 0 if arm == ON else 4,
        "pages": 40 if arm == ON else 0,
    }
    return Block(**(usual | changes))


def turn(on_ms: float = 20.2, off_ms: float = 20.0, concurrency: int = 1, stock_ms: float = 19.0) -> Turn:
    tokens = 4 * concurrency
    mine = (block(OFF, off_ms, tokens=tokens), block(ON, on_ms, tokens=tokens))
    return Turn(concurrency, mine, (block(STOCK, stock_ms, tokens=tokens, unchecked=0),) * 2)


def test_each_engine_has_its_turn_with_its_own_blocks() -> None:
    def engine(*arms: str) -> EngineProcess:
        told = json.dumps([asdict(block(arm)) for arm in arms])
        return EngineProcess(BytesIO(), BytesIO(told.encode() + b"\n"))

    options = Namespace(seed=1, steps=4, prompt_tokens=8)
    found = Bench(options, engine(ON, OFF), engine(STOCK), most=1)._turn(concurrency=2, pairs=1)

    assert found == Turn(2, (block(ON), block(OFF)), (block(STOCK),))


def test_losses_are_of_neighbours_whatever_slows_both() -> None:
    turns = [turn(20.2 * slow, 20.0 * slow) for slow in (1, 3, 10)]

    (row,) = rows(turns, {1: 25.0}, Random(1))

    assert row["throughput_loss_pct"] == pytest.approx(0.99, abs=0.01)
    assert row["throughput_loss_pct_low95"] == row["throughput_loss_pct_high95"] == row["throughput_loss_pct"]
    assert row["p95_itl_increase_pct"] == pytest.approx(1.0)
    assert (row["blocks"], row["step_ms_p50"], row["pages_per_step"]) == (6, 60.0, 10.0)
    assert (row["worker_us"], row["scheduler_us"]) == (50.0, 25.0)


def test_what_the_model_takes_longer_is_not_the_ledgers() -> None:
    """Beside the model a step takes 2.1 ms with a ledger and 2.0 ms without, whatever the model takes."""
    (row,) = rows([turn(19.0, 25.0), turn(25.0, 19.0), turn(20.0, 20.0)], {1: 0.0}, Random(1))

    assert row["model_ms_p50"] == 17.95
    assert row["loss_beside_model_pct"] == round(100 * (1 - (17.95 + 2.0) / (17.95 + 2.1)), 3)
    assert (
        row["loss_beside_model_pct_low95"]
        == row["loss_beside_model_pct_high95"]
        == row["loss_beside_model_pct"]
    )
    assert row["throughput_loss_pct_low95"] < -20 < 20 < row["throughput_loss_pct_high95"]


def test_the_plain_engine_is_compared_with_both_arms() -> None:
    (row,) = rows([turn(20.0, 19.0, stock_ms=19.0)], {1: 0.0}, Random(1))

    assert (row["loss_to_stock_pct"], row["null_loss_to_stock_pct"]) == (5.0, 0.0)


def test_the_summary_has_the_worst_of_all_concurrencies() -> None:
    turns = [turn(20.02, concurrency=1), turn(20.06, concurrency=4), turn(20.04, concurrency=8)]

    found = summary(rows(turns, {1: 10.0, 4: 20.0, 8: 30.0}, Random(1)), turns)

    assert found["worst_concurrency"] == 4
    assert found["throughput_loss_pct_median"] == pytest.approx(0.3, abs=0.01)
    assert found["target_met"] is True
    assert found["target_met_beside_model"] is False  # 0.1 ms of 20
    assert found["loss_beside_model_pct_median"] == pytest.approx(0.5, abs=0.01)
    assert (found["check_us_per_step"], found["pct_of_20ms_step"]) == (80.0, 0.4)
    assert (found["blocks"], found["checks"], found["pages_checked"]) == (6, 12, 120)
    assert found["steps_unchecked"] == 0


@pytest.mark.parametrize(("on_ms", "met"), [(20.07, True), (20.09, False)])
def test_the_target_is_the_worst_median(on_ms: float, met: bool) -> None:
    turns = [turn(on_ms)]

    assert summary(rows(turns, {1: 0.0}, Random(1)), turns)["target_met"] is met


def test_one_wide_interval_misses_the_target() -> None:
    turns = [turn(20.0)] * 3 + [turn(21.0)] * 2

    found = summary(rows(turns, {1: 0.0}, Random(1)), turns)

    assert (found["throughput_loss_pct_median"], found["target_met"]) == (0.0, False)


def test_a_run_is_void_when_an_arm_is_not_what_it_is_called() -> None:
    right = turn()
    unchecked = Turn(1, (right.blocks[0], block(ON, unchecked=1, checked=3)), right.stock)
    checked = Turn(1, (block(OFF, checked=2), right.blocks[1]), right.stock)
    short = Turn(1, (block(OFF, tokens=3), right.blocks[1]), right.stock)

    assert objections([right], 3) == []
    assert objections([right], 2) == ["2 rounds; 3 are needed"]
    assert objections([unchecked], 3) == ["2 steps with the ledger were not checked"]
    assert objections([checked], 3) == ["2 steps without the ledger were checked"]
    assert objections([short], 3) == ["15 tokens were made, 16 expected"]
