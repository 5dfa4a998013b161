"""What a process keeps is told from what it uses for a while."""

import random

import pytest

from tests.support.soak import SAMPLE_EVERY_S, Trace

BOUND_MIB_PER_MIN = 1.0


def saw(minutes: float, leak_mib_per_min: float, seed: int) -> Trace:
    """Memory of a process that fills 60 MiB with holes and gives them back once a minute."""
    rng = random.Random(seed)
    trace = Trace("engine")
    for sample in range(int(minutes * 60 / SAMPLE_EVERY_S)):
        minute = sample * SAMPLE_EVERY_S / 60
        holes = 60 * min(1.0, minute % 1 * rng.uniform(1, 4))
        trace.minutes.append(minute)
        trace.rss_mib.append(2400 + leak_mib_per_min * minute + holes + rng.uniform(0, 3))
        trace.descriptors.append(10)
        trace.threads.append(5)
    return trace


@pytest.mark.parametrize("seed", range(5))
def test_holes_that_come_and_go_are_no_growth(seed: int) -> None:
    assert abs(saw(30, 0.0, seed).growth_mib_per_min(15)) < 0.3


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_below_the_holes_is_seen(seed: int) -> None:
    assert saw(30, 1.5, seed).growth_mib_per_min(15) > BOUND_MIB_PER_MIN


def test_a_window_that_is_not_whole_does_not_count() -> None:
    trace = saw(30, 0.0, 1)
    trace.minutes.append(29.99)
    trace.rss_mib.append(1.0)
    assert len(trace.kept_mib(15)) == 7
    assert min(trace.kept_mib(15)) >= 2400


def test_a_short_run_is_looked_at_in_parts() -> None:
    assert len(saw(2, 0.0, 1).kept_mib(1)) >= 3
    assert saw(2, 60.0, 1).growth_mib_per_min(1) > 20
