from random import Random
from typing import Any

import pytest

from load.gateway_cost import BUS, HANDLE, LATE_MS, TARGET, Window, objections, rows, summary
from load.record import Record, failure


def answer(tokens: int = 10) -> Record:
    times = tuple(0.1 + 0.02 * n for n in range(tokens))
    return Record(0.0, 0.0, times, end_s=times[-1], output_tokens=tokens)


def window(arm: str = BUS, streams: int = 2, **changes: Any) -> Window:
    usual: dict[str, Any] = {
        "arm": arm,
        "streams": streams,
        "records": (answer(),) * streams,
        "cpu_s": {"gateway": 0.001, "decode": 0.001},
        "added_s": (0.004,) * streams,
    }
    return Window(**(usual | changes))


def test_the_cost_of_a_token_is_that_of_all_processes_together() -> None:
    assert window().us_per_token == pytest.approx(100.0)


def test_a_row_has_medians_over_windows_also_by_group() -> None:
    windows = [window(cpu_s={"gateway": seconds, "ray": 0.001}) for seconds in (0.001, 0.002, 0.009)]

    (row,) = rows(windows)

    assert (row["streams"], row["arm"], row["windows"]) == (2, BUS, 3)
    assert row["cpu_us_per_token"] == 150.0
    assert row["us_per_token_by_group"] == {"gateway": 100.0, "ray": 50.0}
    assert (row["ttft_added_ms_p50"], row["itl_ms_p50"]) == (4.0, 20.0)


def test_arms_and_numbers_of_streams_are_rows_of_their_own() -> None:
    found = rows([window(), window(HANDLE), window(streams=8), window(HANDLE, streams=8)])

    assert [(row["streams"], row["arm"]) for row in found] == [
        (streams, arm) for streams in (2, 8) for arm in sorted((BUS, HANDLE))
    ]


def test_the_ratio_is_of_windows_that_lie_next_to_each_other() -> None:
    windows = []
    for slow in (1, 3, 10):  # the machine gets slower, for both
        windows.append(window(BUS, cpu_s={"gateway": 0.001 * slow}))
        windows.append(window(HANDLE, cpu_s={"gateway": 0.002 * slow}))

    found = summary(windows, 2, Random(1))

    assert (found["ratio_to_handle"], found["ratio_to_handle_low95"]) == (0.5, 0.5)
    assert found["target_met"] is True
    assert (found["cpu_us_per_token"], found["cpu_us_per_token_handle"]) == (150.0, 300.0)


@pytest.mark.parametrize(("share", "met"), [(TARGET, True), (TARGET + 0.01, False)])
def test_the_target_is_met_up_to_its_value(share: float, met: bool) -> None:
    windows = [window(BUS, cpu_s={"gateway": share}), window(HANDLE, cpu_s={"gateway": 1.0})]

    assert summary(windows, 2, Random(1))["target_met"] is met


def test_the_ratio_without_the_control_plane_stands_beside_the_one_of_everything() -> None:
    control = {"ray": 1.0, "serve controller": 1.0}
    windows = [
        window(BUS, cpu_s={"gateway": 1.0} | control),
        window(HANDLE, cpu_s={"gateway": 2.0} | control),
    ]

    found = summary(windows, 2, Random(1))

    assert (found["ratio_to_handle"], found["serving_ratio_to_handle"]) == (0.75, 0.5)


def test_the_summary_is_of_its_number_of_streams_only() -> None:
    assert summary([window(streams=2), window(HANDLE, streams=2)], 64, Random(1))["ratio_to_handle"] is None


def test_a_clean_run_has_no_objections() -> None:
    assert objections([window()], 10, 3, LATE_MS) == []


@pytest.mark.parametrize(
    ("windows", "rounds", "late_ms"),
    [
        ([window()], 2, 1.0),
        ([window(records=(answer(), failure(0.0, 0.0, "503")))], 3, 1.0),
        ([window(records=(answer(9),))], 3, 1.0),
        ([window()], 3, LATE_MS + 1),
        ([window()], 3, None),
    ],
    ids=["few rounds", "a failure", "a short answer", "a late client", "a client that did not watch itself"],
)
def test_each_reason_to_doubt_the_run_is_told(
    windows: list[Window], rounds: int, late_ms: float | None
) -> None:
    assert len(objections(windows, 10, rounds, late_ms)) == 1
