from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.statistics import bootstrap, median, percentile

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(VALUES)
def test_the_ends_of_the_scale_are_the_extremes(values: list[float]) -> None:
    assert (percentile(values, 0), percentile(values, 1)) == (min(values), max(values))


def test_a_percentile_lies_between_the_two_nearest_ranks() -> None:
    assert [percentile([30, 10, 20], share) for share in (0.25, 0.5, 0.95)] == [15, 20, pytest.approx(29)]


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_percentile_of_nothing_or_beyond_the_scale_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="no percentile"):
        percentile(values, share)


@given(VALUES, st.integers(0, 100))
def test_an_interval_lies_within_the_values_and_is_the_same_for_the_same_seed(
    values: list[float], seed: int
) -> None:
    first, again = (bootstrap(values, Random(seed), resamples=50) for _ in range(2))

    assert first == again
    assert min(values) <= first.low <= first.high <= max(values)
    assert first.value == median(values)


def test_an_interval_shrinks_with_more_values() -> None:
    few = bootstrap([1.0, 2.0, 3.0, 4.0], Random(1))
    many = bootstrap([1.0, 2.0, 3.0, 4.0] * 50, Random(1))

    assert many.high - many.low < (few.high - few.low) / 2
