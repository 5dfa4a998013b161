"""Messages out of turn, too late, lost, or of another version: the wire between both ends is the test's."""

from dataclasses import replace

import msgspec
import pytest

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.protocol import messages as m
from kv_transfer.transport.lane import checksum
from tests.support.transfer_world import ADDRESS, LAYOUT, World


def test_messages_out_of_turn_fail_that_transfer_and_no_other(world: World) -> None:
    """A peer that says what its state does not allow must not bring the thread down."""
    for name in ("a", "b"):
        world.announce(name)
        world.ask(name, pages=1)
    world.settle()

    world.receiver.on_message(ADDRESS, m.Drained(transfer_id="a"))
    world.receiver.on_message(ADDRESS, m.Ready(transfer_id="a", layout=LAYOUT, pages=1))
    world.receiver.on_message(ADDRESS, m.Drained(transfer_id="never heard of"))
    world.sender.on_message(b"decode-route", m.Done(transfer_id="b"))
    world.ship("b", 0, 1)
    world.settle()

    causes = {o.order.ticket.transfer_id: o.cause for o in world.outcomes()}
    assert causes == {"a": TransferCause.PROTOCOL, "b": None}


def test_pages_are_released_also_when_done_overtakes_the_lanes_own_report(world: World) -> None:
    """Decode may copy and confirm before prefill's lane thread has said that the bytes are out.

    The confirmation was once ignored then, and the pages stayed held until the request's deadline.
    """
    world.start("t", pages=1)
    world.ship("t", 0, 1)
    world.settle(bytes_move=False)
    wire = world.links["link0"]
    sending, receiving = wire.sends.popleft(), wire.recvs.popleft()
    receiving.into.copy_(sending.data)
    receiving.ended(checksum(receiving.into), None)
    world.settle()
    assert [o.cause for o in world.outcomes()] == [None]

    sending.ended(None)
    world.settle()

    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_a_confirmation_before_everything_was_shipped_ends_nothing(world: World) -> None:
    world.start("t", pages=2)
    world.ship("t", 0, 1)
    world.settle()

    world.sender.on_message(b"decode-route", m.Done(transfer_id="t"))
    world.ship("t", 1, 1)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [None]


def test_a_second_announcement_changes_nothing(world: World) -> None:
    world.start("t", pages=1)
    world.announce("t", peer="somebody else")
    world.ship("t", 0, 1)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [None]


def test_a_link_lost_at_the_sender_only_fails_at_once_and_is_built_anew(world: World) -> None:
    world.start("a", pages=1)
    sender_down = world.links["link0"].down[1]
    sender_down(TransferError(TransferCause.LINK_DOWN, "test"))
    world.settle()
    assert [o.cause for o in world.outcomes()] == [TransferCause.LINK_DOWN]

    world.carry("b")

    assert [o.cause for o in world.outcomes()] == [None]
    assert "link1" in world.links


def test_a_lost_announcement_of_bytes_does_not_give_one_transfers_pages_to_another(world: World) -> None:
    """Without its header a page group stays on the link, and the next receive would take it."""
    world.start("a", pages=1)
    world.start("b", pages=1)
    world.ship("a", 0, 1)
    while world.work:
        world.work.popleft()()
    assert isinstance(world.to_receiver.popleft(), m.Sent)
    world.ship("b", 0, 1)
    world.settle()

    assert {o.order.ticket.transfer_id: o.groups for o in world.outcomes()} == {"a": (), "b": ()}


@pytest.mark.parametrize(
    ("pages", "wire_bytes"),
    [
        (0, 0),
        (-1, LAYOUT.page_bytes),
        (3, 3 * LAYOUT.page_bytes),
        (1, LAYOUT.page_bytes - 4),
        (1, 2 * LAYOUT.page_bytes),
    ],
    ids=["no page", "less than none", "more than asked", "short", "long"],
)
def test_a_page_group_of_the_wrong_size_fails_its_transfer(world: World, pages: int, wire_bytes: int) -> None:
    world.start("t", pages=2)

    header = m.Sent(transfer_id="t", first_page=0, pages=pages, wire_bytes=wire_bytes, checksum=0)
    world.receiver.on_message(ADDRESS, header)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [TransferCause.PROTOCOL]


def test_a_sender_that_is_ready_with_another_layout_is_not_listened_to(world: World) -> None:
    world.ask("t", pages=1)
    world.settle()

    other = replace(LAYOUT, interior="cpu/other")
    world.receiver.on_message(ADDRESS, m.Ready(transfer_id="t", layout=other, pages=1))
    world.settle()

    assert [o.cause for o in world.outcomes()] == [TransferCause.LAYOUT_MISMATCH]


@pytest.mark.parametrize(
    "change", [{"version": m.VERSION + 1}, {"pages": 0}, {"first_page": -1}], ids=lambda c: next(iter(c))
)
def test_an_offer_that_this_version_cannot_mean_is_refused(world: World, change: dict[str, int]) -> None:
    world.start("t", pages=1)
    offer = next(msg for msg in world.heard_by_sender if isinstance(msg, m.Offer))

    world.announce("u")
    world.sender.on_message(b"r", msgspec.structs.replace(offer, transfer_id="u", **change))
    refusal = world.to_receiver.popleft()

    assert isinstance(refusal, m.Failed)
    assert (refusal.transfer_id, refusal.cause) == ("u", TransferCause.PROTOCOL)
    assert "u" not in world.sender.wanted()


def test_only_the_receiver_can_confirm_its_transfer(world: World) -> None:
    world.start("t", pages=1)
    world.ship("t", 0, 1)
    world.settle()

    world.sender.on_message(b"stranger", m.Done(transfer_id="t"))
    assert world.sender.take_closed() == []

    world.outcomes()
    assert world.sender.take_closed() == ["t"]


def test_news_of_an_older_link_does_not_touch_the_newer_one(world: World) -> None:
    world.start("a")
    world.links["link0"].break_down()
    world.settle()
    world.outcomes()
    world.start("b", pages=1)

    receiver_down = world.links["link0"].down[0]
    receiver_down(TransferError(TransferCause.LINK_DOWN, "late"))
    world.ship("b", 0, 1)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [None]
