from random import Random

import pytest

from load.comparison import Measured, rows, same_text_share, summary
from load.plan import Cell
from load.record import Record, failure

CELL = Cell(128, 1)
ARMS = ("ours", "theirs")


def record(*, ttft_s: float = 0.1, gap_s: float = 0.01, tokens: int = 5, text: str = "x") -> Record:
    return Record(
        due_s=10.0,
        sent_s=10.0,
        chunk_s=tuple(10 + ttft_s + gap_s * n for n in range(tokens)),
        prompt_tokens=130,
        output_tokens=tokens,
        finish_reason="length",
        text=text,
    )


def pair(ours: Record, theirs: Record, cell: Cell = CELL) -> Measured:
    return Measured(cell, {"ours": (ours,), "theirs": (theirs,)})


def test_a_first_token_after_twice_the_time_is_a_ratio_of_two_and_half_the_rate_of_a_half() -> None:
    found = pair(record(ttft_s=0.2, gap_s=0.02), record()).ratios(*ARMS)

    assert found == pytest.approx((2.0, 0.5))


def test_a_pair_with_a_failed_request_has_no_ratio_but_counts_as_failed() -> None:
    measured = [pair(failure(0, 0, "503"), record()), pair(record(), record())]

    result = summary(measured, *ARMS, Random(1))

    assert (result["pairs"], result["failed"]) == (1, 1)


def test_where_everything_failed_no_ratio_is_claimed() -> None:
    result = summary([pair(failure(0, 0, "503"), record())], *ARMS, Random(1))

    assert "ttft_ratio_p50" not in result
    assert result["same_text_share"] is None


def test_each_cell_has_its_own_ratio() -> None:
    other = Cell(512, 1)
    measured = [pair(record(ttft_s=0.2), record()), pair(record(ttft_s=0.3), record(), other)]

    cells = summary(measured, *ARMS, Random(1))["cells"]

    assert [(row["prompt_tokens"], row["ttft_ratio_p50"]) for row in cells] == [(128, 2.0), (512, 3.0)]


def test_one_row_for_each_cell_and_arm_in_milliseconds() -> None:
    table = rows([pair(record(ttft_s=0.2), record())] * 3, ARMS)

    assert [row["arm"] for row in table] == ["ours", "theirs"]
    assert table[0] == {
        "arm": "ours",
        "prompt_tokens_aim": 128,
        "concurrency": 1,
        "requests": 3,
        "failed": 0,
        "prompt_tokens": 130,
        "output_tokens": 5,
        "ended_at_length": 3,
        "ttft_ms_p50": 200.0,
        "ttft_ms_p95": 200.0,
        "itl_ms_p50": 10.0,
        "tok_s": 100.0,
    }


def test_answers_that_differ_are_counted() -> None:
    measured = [pair(record(text="a"), record(text="a")), pair(record(text="a"), record(text="b"))]

    assert same_text_share(measured, *ARMS) == 0.5
