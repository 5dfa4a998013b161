"""The engine program of `python -m load integrity-cost`, on a real engine with two layers."""

from pathlib import Path
from typing import Any

import pytest

from kv_transfer.testing.micro import check_us
from load.engine_process import engine_process
from load.servers import ServerFailed
from tests.support.real_scheduler import engine_config

PAIR = ["generation", "null"]


def start(folder: Path, **changed: Any) -> dict[str, Any]:
    engine_config(folder)  # writes the model's configuration
    usual = {"model": str(folder), "dtype": "float32", "block_size": 32, "concurrency": 3, "length": 400}
    return usual | {"stock": False, "layers": 2} | changed


def order(kind: str, arms: list[str]) -> dict[str, Any]:
    return {"type": kind, "arms": arms, "concurrency": 3, "steps": 8, "prompt_tokens": 30, "seed": 1}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_ledger_comes_and_goes_in_one_engine(tmp_path: Path) -> None:
    with engine_process(start(tmp_path), threads=1, cache_gib=1) as engine:
        first = engine.ask(order("Blocks", [*PAIR, *PAIR[::-1]]))
        plan = engine.ask(order("Plan", PAIR * 2))
        again = engine.ask(order("Blocks", PAIR))

    assert [block["arm"] for block in first] == ["generation", "null", "null", "generation"]
    for block in [*first, *again]:
        on = block["arm"] == "generation"
        assert (len(block["step_s"]), block["tokens"]) == (8, 24)
        assert (block["checked"], block["unchecked"]) == ((8, 0) if on else (0, 8))
        assert (block["pages"] > 0, block["worker_s"] > 0) == (on, on)
        assert 0 < block["model_s"] < sum(block["step_s"])
    assert [arm for arm, _ in plan] == PAIR * 2
    assert all(seconds > 0 for _, seconds in plan)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_plain_engine_has_nothing_of_ours_and_runs_as_nothing_else(tmp_path: Path) -> None:
    def run_as(arm: str) -> dict[str, Any]:
        with engine_process(start(tmp_path, stock=True), threads=1, cache_gib=1) as engine:
            (block,) = engine.ask(order("Blocks", [arm]))
            return dict(block)

    block = run_as("stock")
    assert (block["tokens"], block["checked"], block["unchecked"]) == (24, 0, 0)
    with pytest.raises(ServerFailed, match="this engine cannot run as null"):
        run_as("null")


def test_the_check_alone_is_measured_by_form() -> None:
    found = check_us(4, 6, 32)

    assert [row["form"] for row in found][:3] == [
        "numpy, as in use",
        "numpy, no page new",
        "torch gather, the reference",
    ]
    assert all((row["rows"], row["pages"]) == (4, 6) and row["us"] > 0 for row in found)
