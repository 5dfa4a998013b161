"""What `python -m load formats` makes of closed loops."""

from random import Random
from typing import Any

import pytest

from load import density
from load.density import NARROW, WIDE, Loop, Worth

WORTH = Worth(cache_gib=0.5, itl_bound_s=1.0, cost_per_hour=3.6)


def loop(arm: str, concurrency: int, tok_s: float, **changes: Any) -> Loop:
    usual: dict[str, Any] = {"pages": None, "preemptions": 0, "most_running": concurrency, "itl_s": 0.5}
    return Loop(arm=arm, concurrency=concurrency, tok_s=tok_s, **(usual | changes))


def ramp(tok_s: list[float]) -> list[Loop]:
    return [loop(WIDE, 2**n, value) for n, value in enumerate(tok_s)]


def bounded(wide: dict[int, float], narrow: dict[int, float]) -> list[Loop]:
    return [loop(WIDE, c, t, pages=10, preemptions=2) for c, t in wide.items()] + [
        loop(NARROW, c, t, pages=20) for c, t in narrow.items()
    ]


def test_the_largest_concurrency_that_doubling_still_helps_is_chosen() -> None:
    found = density.curve(ramp([10, 19, 35, 50, 60]), WIDE, None)

    assert found == {1: 10, 2: 19, 4: 35, 8: 50, 16: 60}
    assert density.c_star(found) == 4


@pytest.mark.parametrize("tok_s", [[10, 12, 14, 16], [10], []])
def test_where_doubling_helps_too_little_there_is_none(tok_s: list[float]) -> None:
    found = density.curve(ramp(tok_s), WIDE, None)

    assert density.c_star(found) is None
    told = density.summary(ramp(tok_s), {}, None, WORTH)
    assert (told["no_cstar"], told["ceiling"], told["best_throughput_ratio"]) == (True, None, None)


def test_the_best_of_each_format_is_compared_and_held_against_the_ceiling() -> None:
    loops = [*ramp([10, 19, 35, 50]), *bounded({4: 30, 8: 32}, {4: 29, 8: 44})]

    told = density.summary(loops, {WIDE: 10, NARROW: 20}, 4, WORTH)

    assert told["ceiling"] == round(50 / 35, 3)
    assert told["best_throughput_ratio"] == 44 / 32
    assert told["share_of_ceiling"] == round(44 / 32 / (50 / 35), 3)
    assert told["target_met"]
    assert told["equal_concurrency_ratio"] == {"4": round(29 / 30, 3), "8": 1.375}
    assert told["preemptions"] == {WIDE: 4, NARROW: 0}
    assert told["useful_tok_s_per_gib"] == {WIDE: 64.0, NARROW: 88.0}
    assert told["cost_per_mtok"] == {WIDE: 31.25, NARROW: 22.73}


def test_a_ratio_below_nine_tenths_of_the_ceiling_does_not_meet_it() -> None:
    loops = [*ramp([10, 19, 35, 50]), *bounded({4: 30}, {4: 38})]

    assert not density.summary(loops, {WIDE: 10, NARROW: 20}, 4, WORTH)["target_met"]


def test_loops_too_slow_for_their_clients_are_of_no_use() -> None:
    assert WORTH.useful(loop(WIDE, 4, 30, pages=10, itl_s=1.1)) == 0.0
    assert WORTH.useful(loop(WIDE, 4, 30, pages=10, itl_s=1.0)) == 60.0
    assert WORTH.useful(loop(WIDE, 4, 30)) is None


def test_rows_are_medians_and_sums_of_repeats_in_order() -> None:
    loops = [
        loop(NARROW, 8, 3.0, pages=20, preemptions=1),
        loop(WIDE, 16, 5.0),
        loop(NARROW, 8, 1.0, pages=20, preemptions=2),
        loop(NARROW, 8, 2.0, pages=20),
        loop(WIDE, 2, 4.0),
    ]

    table = density.rows(loops, WORTH)

    assert [(row["kv_format"], row["concurrency"], row["pages"]) for row in table] == [
        (WIDE, 2, None),
        (WIDE, 16, None),
        (NARROW, 8, 20),
    ]
    assert (table[2]["tok_s"], table[2]["loops"], table[2]["preemptions"]) == (2.0, 3, 3)


def test_pages_are_whole_and_prompts_share_none() -> None:
    assert density.pages_of(192, 32, 4) == 24
    assert density.pages_of(193, 32, 4) == 28
    made = density.prompts(Random(1), 5, 64, 49152)
    assert len({tuple(prompt[:32]) for prompt in made}) == 5


def test_loops_that_are_missing_make_the_run_invalid() -> None:
    assert density.objections(ramp([10, 19]), 2) == []
    assert density.objections(ramp([10]), 2) == ["1 loops of 2"]
