from dataclasses import replace
from typing import Any

import pytest

from load.capacity import HEADLINES, Terms, headline, row, span_s, withheld, within
from load.client import TIMEOUT
from load.record import Record, failure

TERMS = Terms(ttft_bound_s=1.0, itl_bound_s=0.2, cache_gib=2.0, cost_per_hour=3.6)


def answer(due: float, ttft: float = 0.5, gap: float = 0.1, tokens: int = 11) -> Record:
    times = tuple(due + ttft + gap * n for n in range(tokens))
    return Record(due, due, times, end_s=times[-1], prompt_tokens=7, output_tokens=tokens)


def test_rates_are_of_the_time_with_requests_inside_not_of_the_pauses_between() -> None:
    found = row([(answer(0.0),), (answer(100.0),)], TERMS)

    assert found["seconds"] == 3.0
    assert found["throughput_tok_s"] == pytest.approx(22 / 3, abs=0.05)
    assert found["requests_per_s"] == pytest.approx(2 / 3, abs=0.001)
    assert (found["ttft_p50_ms"], found["itl_p50_ms"], found["e2e_p95_ms"]) == (500, 100, 1500)


def test_useful_tokens_are_those_of_requests_within_both_bounds() -> None:
    batch = (answer(0.0), answer(0.0, ttft=1.1), answer(0.0, gap=0.3))

    found = row([batch], TERMS)

    assert [within(record, TERMS) for record in batch] == [True, False, False]
    assert found["useful_share"] == pytest.approx(1 / 3, abs=0.001)
    assert found["useful_tok_s_per_gib"] == pytest.approx(11 / 3.5 / 2, abs=0.01)


def test_the_cost_of_a_million_tokens_follows_from_the_rate() -> None:
    found = row([(answer(0.0, tokens=16),)], TERMS)  # 8 tokens a second, a thousandth of a unit a second

    assert found["throughput_tok_s"] == 8.0
    assert found["cost_per_mtok"] == 125.0


def test_what_is_not_known_is_none_and_not_zero() -> None:
    found = row([(answer(0.0),)], replace(TERMS, cache_gib=None, cost_per_hour=None))

    assert (found["useful_tok_s_per_gib"], found["cost_per_mtok"]) == (None, None)


def test_failures_are_counted_and_their_tokens_are_not() -> None:
    failed = (failure(0.0, 0.0, TIMEOUT), failure(0.0, 0.0, "503"))

    found = row([(*failed, answer(0.0), answer(0.0))], TERMS)

    assert (found["requests"], found["failed"], found["timeout_rate"]) == (4, 2, 0.25)
    assert found["throughput_tok_s"] == pytest.approx(22 / 1.5, abs=0.05)


def test_a_row_without_a_good_request_has_no_figures() -> None:
    found = row([(failure(0.0, 0.0, "503"),)], TERMS)

    assert found["failed"] == 1
    assert found["throughput_tok_s"] is None
    assert found["ttft_p50_ms"] is None


def test_a_batch_lasts_until_its_last_good_request() -> None:
    assert span_s((answer(1.0), answer(3.0), failure(0.5, 0.5, "503"))) == 4.0


def a_row(clients: int, rate: float | None, **changes: Any) -> dict[str, Any]:
    names = {"loop": "closed", "concurrency": clients, "rate_rps": None, "prompt_tokens_aim": 128}
    figures = dict.fromkeys(HEADLINES, 1.0) | {"requests": 10, "failed": 0, "timeout_rate": 0.0}
    return names | figures | {"throughput_tok_s": rate} | changes


def test_the_headline_is_one_row_and_says_which() -> None:
    found = headline([a_row(1, 10.0), a_row(8, 60.0, itl_p50_ms=9.0), a_row(16, 50.0, failed=3)])

    assert (found["throughput_tok_s"], found["itl_p50_ms"]) == (60.0, 9.0)
    assert found["at"]["concurrency"] == 8
    assert found["failed"] == 3
    assert set(HEADLINES) < set(found)


def test_the_timeout_rate_is_of_all_requests() -> None:
    assert headline([a_row(1, 10.0), a_row(2, 20.0, timeout_rate=0.5)])["timeout_rate"] == 0.25


def test_without_any_answer_there_is_no_headline() -> None:
    found = headline([a_row(1, None, failed=10)])

    assert (found["throughput_tok_s"], found["failed"], found["at"]) == (None, 10, None)


def test_a_run_that_is_not_valid_reports_no_figures() -> None:
    found = withheld(headline([a_row(8, 60.0)]))

    assert {found[name] for name in HEADLINES if name != "failed"} == {None}
    assert found["failed"] == 0
