"""Two formats of decode's cache: when new requests turn to the denser one, and when they come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.pressure import Marks, formats, leans_to_dense, pressure
from gateway.routing.snapshot import Candidate
from kv_transfer.api import WireFormat

MARKS = Marks(above=0.8, below=0.6)
shares = st.floats(0, 1)


def engine(name: str, format: WireFormat, *, free: int = 10, total: int = 10) -> Candidate:
    return Candidate(replica_id=name, format=format, total_pages=total, free_pages=free, load=0)


def test_the_widest_and_the_densest_are_told_apart() -> None:
    mixed = [engine("a", WireFormat.FP8_E4M3), engine("b", WireFormat.FP32), engine("c", WireFormat.BF16)]

    assert formats(mixed) == (WireFormat.FP32, WireFormat.FP8_E4M3)
    assert formats([engine("b", WireFormat.BF16), engine("c", WireFormat.BF16)]) is None
    assert formats([]) is None


def test_pressure_is_what_all_hold_over_what_the_wide_ones_could() -> None:
    fleet = [
        engine("a", WireFormat.BF16, free=0),
        engine("b", WireFormat.BF16, free=30, total=30),
        engine("c", WireFormat.FP8_E4M3, free=1),
    ]

    assert pressure(fleet, WireFormat.BF16) == (10 + 0 + 9) / 40
    assert pressure(fleet[:2], WireFormat.BF16) == 0.25
    assert pressure(fleet, WireFormat.FP32) == 1.0


@given(shares, st.booleans())
def test_above_the_upper_mark_it_is_the_dense_one_and_below_the_lower_the_wide_one(
    share: float, was: bool
) -> None:
    now = leans_to_dense(was, share, MARKS)

    if share >= MARKS.above:
        assert now
    elif share <= MARKS.below:
        assert not now
    else:
        assert now is was


@given(st.lists(shares, max_size=60))
def test_it_turns_once_for_each_crossing_of_both_marks(found: list[float]) -> None:
    leaning, turned, crossings, last = False, 0, 0, MARKS.below
    for share in found:
        now = leans_to_dense(leaning, share, MARKS)
        turned += now is not leaning
        leaning = now
        if (share >= MARKS.above and last <= MARKS.below) or (share <= MARKS.below and last >= MARKS.above):
            crossings += 1
        if not MARKS.below < share < MARKS.above:
            last = share

    assert turned == crossings


@pytest.mark.parametrize(("below", "above"), [(0.8, 0.8), (0.9, 0.8), (0.0, 0.5), (0.5, 1.1)])
def test_marks_out_of_order_are_refused(below: float, above: float) -> None:
    with pytest.raises(ValueError, match="marks must be"):
        Marks(below=below, above=above)
