"""Ranges of several ranks are those of the whole layer."""

import math

import pytest

from workers.engine.ranges import over_ranks


def test_a_layer_is_as_large_as_its_largest_rank() -> None:
    ranks = [[("one", 1.0, 5.0), ("two", 2.0, 0.0)], [("one", 3.0, 4.0), ("two", 0.5, 0.25)]]

    assert over_ranks(ranks) == {"one": (3.0, 5.0), "two": (2.0, 0.25)}
    assert list(over_ranks(ranks)) == ["one", "two"]


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_no_number_on_one_rank_is_none_in_the_layer(order: int) -> None:
    ranks = [[("one", math.nan, 1.0)], [("one", 2.0, 1.0)]][::order]

    assert math.isnan(over_ranks(ranks)["one"][0])
