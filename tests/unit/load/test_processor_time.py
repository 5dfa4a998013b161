import os
import time

from load.processor_time import REST, ProcessorTime, rows, spent
from load.stacks import Watched


def test_time_is_counted_from_the_start_and_by_name() -> None:
    before, after = {1: 5.0, 2: 1.0, 3: 2.0}, {1: 5.5, 2: 1.0, 3: 2.25}

    assert spent(before, after, {1: "prefill", 2: "decode"}) == {"prefill": 0.5, "decode": 0.0, REST: 0.25}


def test_a_new_process_counts_whole_and_an_ended_one_not_at_all() -> None:
    assert spent({1: 5.0}, {2: 0.5}, {1: "prefill"}) == {REST: 0.5}


def test_two_processes_with_one_name_add_up() -> None:
    assert spent({1: 0.0, 2: 0.0}, {1: 1.0, 2: 2.0}, {1: "gateway", 2: "gateway"}) == {"gateway": 3.0}


def test_rows_are_milliseconds_per_request() -> None:
    assert rows({"prefill": 2.0}, requests=4) == [{"process": "prefill", "cpu_ms_per_request": 500.0}]


def test_work_of_this_process_is_seen() -> None:
    used = ProcessorTime([Watched("me", os.getpid())], [])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass

    assert 0.03 <= used.spent_s()["me"] < 5
