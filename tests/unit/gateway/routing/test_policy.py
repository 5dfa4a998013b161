from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.policy import choose
from gateway.routing.snapshot import Ask, Candidate
from kv_transfer.api import WireFormat

# Small numbers: ties and full replicas are common.
small = st.integers(0, 3)
asks = st.builds(Ask, request_id=st.text("ab", max_size=2), pages=small)
formats = st.sampled_from([WireFormat.BF16, WireFormat.FP8_E4M3])
candidates = st.builds(
    Candidate,
    replica_id=st.sampled_from("wxyz"),
    format=formats,
    total_pages=small,
    free_pages=small,
    load=small,
)
fleets = st.lists(candidates, max_size=4, unique_by=lambda candidate: candidate.replica_id)


@given(asks, fleets)
def test_nobody_is_chosen_exactly_when_the_request_is_larger_than_every_replica(
    ask: Ask, fleet: list[Candidate]
) -> None:
    largest = max([candidate.total_pages for candidate in fleet], default=-1)

    assert (choose(ask, fleet) is None) == (largest < ask.pages)


@given(asks, fleets)
def test_no_other_replica_with_room_is_less_loaded_than_the_chosen_one(
    ask: Ask, fleet: list[Candidate]
) -> None:
    if chosen := choose(ask, fleet):
        roomy = [c for c in fleet if min(c.free_pages, c.total_pages) >= ask.pages]
        if roomy:
            assert chosen in roomy
            assert chosen.load == min(candidate.load for candidate in roomy)


@given(asks, fleets, st.randoms(use_true_random=False))
def test_order_of_the_fleet_does_not_matter(ask: Ask, fleet: list[Candidate], rng: Random) -> None:
    assert choose(ask, fleet) == choose(ask, rng.sample(fleet, len(fleet)))


@given(asks, fleets)
def test_winner_stays_the_winner_when_its_load_falls(ask: Ask, fleet: list[Candidate]) -> None:
    if first := choose(ask, fleet):
        better = [replace(c, load=0) if c is first else c for c in fleet]

        assert choose(ask, better) == replace(first, load=0)


def test_equal_replicas_share_many_requests() -> None:
    fleet = [
        Candidate(replica_id=name, format=WireFormat.BF16, total_pages=9, free_pages=9, load=0)
        for name in ("d1", "d2")
    ]

    chosen = [choose(Ask(request_id=str(number), pages=1), fleet) for number in range(200)]

    assert 60 < chosen.count(fleet[0]) < 140


@given(asks, fleets, formats)
def test_the_preferred_format_is_chosen_where_it_has_room_and_no_request_is_lost_for_it(
    ask: Ask, fleet: list[Candidate], preferred: WireFormat
) -> None:
    chosen = choose(ask, fleet, preferred=preferred)

    assert (chosen is None) == (choose(ask, fleet) is None)
    roomy = [c for c in fleet if min(c.free_pages, c.total_pages) >= ask.pages]
    if any(c.format is preferred for c in roomy):
        assert chosen is not None
        assert chosen.format is preferred
    elif roomy:
        assert chosen in roomy
