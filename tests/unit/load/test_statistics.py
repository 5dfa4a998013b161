"""Ratios and what a record says, checked against figures worked out by hand."""

from random import Random

import pytest

from load.client import Record
from load.statistics import ratio_of_medians


def test_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    ratio = ratio_of_medians([2.0, 4.0, 6.0], [1.0, 2.0, 9.0], Random(1))

    assert ratio.value == 2.0
    assert ratio.low <= ratio.value <= ratio.high
    assert ratio.low < ratio.high


def test_equal_samples_without_spread_have_a_ratio_of_exactly_one() -> None:
    ratio = ratio_of_medians([3.0] * 5, [3.0] * 5, Random(1))

    assert (ratio.low, ratio.value, ratio.high) == (1.0, 1.0, 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    samples = ([1.0, 2.0, 3.0, 5.0], [1.0, 1.5, 2.0])

    assert ratio_of_medians(*samples, Random(7)) == ratio_of_medians(*samples, Random(7))


def test_an_empty_sample_has_no_ratio() -> None:
    with pytest.raises(ValueError, match="two samples"):
        ratio_of_medians([], [1.0], Random(1))


def test_rate_counts_the_tokens_after_the_first_one() -> None:
    record = Record("x", 10, 5, (0.5, 0.75, 1.0, 1.25, 1.5), "id")

    assert record.ttft_s == 0.5
    assert record.tokens_per_s == 4.0
