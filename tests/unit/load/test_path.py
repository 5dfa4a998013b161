from typing import Any

import pytest

from load.comparison import Measured
from load.path import handoff_objections, length_objections, verdict
from load.plan import Cell
from load.record import Record, failure


def handoff(**changed: Any) -> dict[str, Any]:
    return {
        "prompt_tokens_aim": 128,
        "concurrency": 1,
        "requests": 8,
        "shipped": 8,
        "cached_tokens_max": 0,
    } | changed


def test_a_run_of_enough_rounds_without_failures_is_valid() -> None:
    assert verdict([{"failed": 0}], 3) + handoff_objections([handoff()]) == []


@pytest.mark.parametrize(("failed", "rounds"), [(1, 3), (0, 2)])
def test_a_failed_request_or_too_few_rounds_make_a_run_invalid(failed: int, rounds: int) -> None:
    assert len(verdict([{"failed": failed}], rounds)) == 1


@pytest.mark.parametrize("changed", [{"shipped": 7}, {"cached_tokens_max": 32}])
def test_a_request_that_did_not_take_the_path_makes_a_run_invalid(changed: dict[str, int]) -> None:
    assert len(handoff_objections([handoff(**changed)])) == 1


def pair(ours: Record, theirs: Record) -> list[Measured]:
    return [Measured(Cell(128, 1), {"phasegate": (ours,), "vllm": (theirs,)})]


def answer(prompt_tokens: int = 130, output_tokens: int = 32) -> Record:
    return Record(0.0, 0.0, (1.0, 2.0), prompt_tokens=prompt_tokens, output_tokens=output_tokens)


@pytest.mark.parametrize("theirs", [answer(output_tokens=31), answer(prompt_tokens=131)])
def test_servers_that_did_different_amounts_of_work_make_a_run_invalid(theirs: Record) -> None:
    assert len(length_objections(pair(answer(), theirs))) == 1


@pytest.mark.parametrize("theirs", [answer(), failure(0.0, 0.0, "503")])
def test_equal_work_and_failures_counted_elsewhere_are_no_objection(theirs: Record) -> None:
    assert length_objections(pair(answer(), theirs)) == []
