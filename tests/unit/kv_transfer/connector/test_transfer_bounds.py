"""What both ends of a transfer remember, open and hold, and for how long; the wire is the test's."""

import pytest

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.protocol import messages as m
from tests.support.transfer_world import ADDRESS, World


def test_whoever_asks_for_a_transfer_whose_prefill_has_ended_is_told_at_once(world: World) -> None:
    """The offer may be on its way while the prefill request dies; it once waited for its own deadline."""
    world.announce("t")
    world.sender.gone("t")

    world.ask("t", deadline_s=300.0)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [TransferCause.PREFILL_ENDED]
    assert world.quiet()


def test_what_is_over_is_forgotten_in_time(world: World) -> None:
    world.announce("t")
    world.sender.gone("t")
    world.pass_time(61)

    world.ask("t", deadline_s=5.0)
    world.settle()

    assert world.outcomes() == []
    assert world.sender.in_flight() == 1


def test_a_transfer_that_was_declined_before_its_announcement_is_forgotten_in_time(world: World) -> None:
    """Most declines come late, about transfers that are over: each would be remembered for ever."""
    world.decline("t")
    world.settle()
    world.pass_time(61)

    world.start("t", pages=1)

    assert world.sender.wanted().keys() == {"t"}


# -- what opens, and when


def test_an_offer_that_was_not_announced_opens_nothing(world: World) -> None:
    world.ask("t")
    world.settle()
    assert not any(len(wire.down) > 1 for wire in world.links.values()), "the sender joined a stranger's link"
    assert not any(wire.started for wire in world.links.values()), "the receiver waits for nobody yet"

    world.announce("t")
    world.settle()

    (wire,) = world.links.values()
    assert len(wire.down) == 2
    assert wire.started


def test_an_offer_for_another_engines_transfer_opens_nothing(world: World) -> None:
    world.announce("t", peer="somebody else")
    world.ask("t")
    world.settle()

    assert not any(len(wire.down) > 1 for wire in world.links.values())


def test_an_offer_made_before_its_link_was_lost_does_not_revive_the_link(world: World) -> None:
    world.start("a", pages=1)
    (wire,) = world.links.values()
    world.ask("b", pages=1)
    world.settle()
    world.lose_messages = True
    wire.break_down()
    world.settle()
    world.lose_messages = False

    world.announce("b")
    world.settle()

    assert len(wire.down) == 2, "joined twice"
    assert world.sender.wanted() == {}


def test_an_offer_under_way_while_its_link_is_lost_does_not_revive_the_link(world: World) -> None:
    """The receiver does not know yet what the sender knows."""
    world.start("a", pages=1)
    (wire,) = world.links.values()
    world.announce("b")
    world.ask("b", pages=1)
    wire.down[1](TransferError(TransferCause.LINK_DOWN, "test"))
    world.settle()

    assert len(wire.down) == 2, "joined twice"
    assert [o.cause for o in world.outcomes()] == [TransferCause.LINK_DOWN] * 2
    assert world.quiet()


def test_too_many_parked_offers_are_refused_and_those_before_them_are_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.connector.sender.MOST_PARKED", 2)
    for name in ("a", "b", "c"):
        world.ask(name, pages=1)
    world.settle()

    (refused,) = world.outcomes()
    assert refused.order.ticket.transfer_id == "c"
    world.announce("a")
    world.settle()
    assert set(world.sender.wanted()) == {"a"}


# -- staging is bounded


def test_orders_beyond_the_staging_limit_wait_their_turn() -> None:
    world = World(staging_pages=4)
    for name in ("a", "b", "c"):
        world.announce(name)
        world.ask(name, pages=2)
    world.settle()
    assert set(world.sender.wanted()) == {"a", "b"}

    world.ship("a", 0, 2)
    world.settle()
    assert set(world.sender.wanted()) == {"b"}, "what has arrived still takes room until it is copied"
    assert [o.order.ticket.transfer_id for o in world.outcomes()] == ["a"]

    assert set(world.sender.wanted()) == {"b", "c"}


def test_an_order_larger_than_staging_is_let_in_alone() -> None:
    world = World(staging_pages=2)
    world.start("a", pages=5)

    assert set(world.sender.wanted()) == {"a"}


@pytest.mark.parametrize("end", ["cancel", "deadline", "lost"])
def test_an_order_that_waits_for_room_can_end(end: str) -> None:
    world = World(staging_pages=2)
    world.start("a", pages=2)
    world.announce("b")
    world.ask("b", pages=2, deadline_s=5.0)
    world.settle()

    if end == "cancel":
        world.receiver.cancel("b")
    elif end == "deadline":
        world.pass_time(6.0)
    else:
        world.receiver.peer_lost(ADDRESS)
    world.settle()

    causes = {o.order.ticket.transfer_id: o.cause for o in world.outcomes()}
    assert (
        causes["b"]
        is {
            "cancel": TransferCause.CANCELLED,
            "deadline": TransferCause.DEADLINE,
            "lost": TransferCause.LINK_DOWN,
        }[end]
    )
    if end != "lost":
        assert "b" in world.sender.take_closed(), "the sender was told"


# -- peers that go


def test_a_lost_prefill_worker_ends_what_was_expected_of_it(world: World) -> None:
    world.start("a", pages=2)
    world.ask("b", pages=1)
    world.settle()

    world.receiver.peer_lost(ADDRESS)
    world.settle()

    assert {o.cause for o in world.outcomes()} == {TransferCause.LINK_DOWN}
    assert world.receiver.in_flight() == 0
    assert all(wire.broken for wire in world.links.values())


def test_pages_that_have_arrived_are_used_though_their_sender_is_lost(world: World) -> None:
    world.start("a", pages=1)
    world.ship("a", 0, 1)
    world.settle()

    world.receiver.peer_lost(ADDRESS)

    (outcome,) = world.outcomes()
    assert outcome.cause is None


def test_a_lost_decode_worker_frees_the_pages_that_were_held_for_it_and_no_others(world: World) -> None:
    world.start("a", pages=1)
    world.ask("parked", pages=1)
    world.announce("not yet asked for")
    world.settle()
    assert world.sender.routes() == {b"decode-route"}

    world.sender.peer_lost(b"another")
    assert world.sender.take_closed() == []
    world.sender.peer_lost(b"decode-route")

    assert world.sender.take_closed() == ["a"]
    assert world.sender.in_flight() == 1
    assert world.sender.routes() == set()


def test_an_offer_of_a_decode_worker_that_is_lost_waits_for_no_announcement(world: World) -> None:
    world.ask("parked", pages=1)
    world.settle()
    assert world.sender.in_flight() == 1

    world.sender.peer_lost(b"decode-route")

    assert world.sender.in_flight() == 0


# -- released by the gateway


def test_a_release_frees_pages_that_nobody_asked_for(world: World) -> None:
    world.announce("t")

    world.sender.on_message(b"own", m.Release(transfer_id="t"))

    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_a_release_that_overtakes_its_announcement_counts(world: World) -> None:
    world.sender.on_message(b"own", m.Release(transfer_id="t"))
    world.announce("t")
    world.settle()

    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_a_release_in_the_middle_stops_the_transfer_and_tells_the_receiver(world: World) -> None:
    world.start("t", pages=2)
    world.sender.on_message(b"own", m.Release(transfer_id="t"))
    world.settle()

    (outcome,) = world.outcomes()
    assert outcome.cause is TransferCause.CANCELLED
    assert world.sender.take_closed() == ["t"]
    assert world.quiet()
