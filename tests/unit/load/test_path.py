from typing import Any

import pytest

from load.path import handoff_objections, verdict


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
