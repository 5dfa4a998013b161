"""One transfer between a real sender and a real receiver; the wire between them is the test's."""

from dataclasses import replace

import pytest
import torch

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.page import WireFormat
from kv_transfer.protocol import messages as m
from tests.support.transfer_world import ADDRESS, LAYOUT, World


@pytest.mark.parametrize("announced_first", [True, False])
def test_pages_arrive_in_order_whoever_speaks_first(world: World, announced_first: bool) -> None:
    steps = [lambda: world.announce("t"), lambda: world.ask("t", pages=3)]
    for act in steps if announced_first else reversed(steps):
        act()
        world.settle()
    first, second = world.ship("t", 0, 1), world.ship("t", 1, 2)
    world.settle()

    (outcome,) = world.outcomes()

    assert outcome.cause is None
    assert [(g.offset, g.pages) for g in outcome.groups] == [(0, 1), (1, 2)]
    assert torch.equal(torch.cat([g.data for g in outcome.groups]), torch.cat([first, second]))
    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_only_missing_pages_are_asked_for(world: World) -> None:
    world.start("t", first_page=2, pages=1)

    want = world.sender.wanted()["t"]

    assert (want.first_page, want.pages) == (2, 1)


def test_nothing_may_be_gathered_before_somebody_asked(world: World) -> None:
    world.announce("t")
    world.settle()

    assert world.sender.wanted() == {}


def test_another_decode_engine_than_the_announced_one_gets_nothing(world: World) -> None:
    world.announce("t", peer="somebody else")
    world.ask("t")
    world.settle()

    (outcome,) = world.outcomes()

    assert outcome.cause is TransferCause.FOREIGN_PEER
    assert world.sender.wanted() == {}
    assert world.quiet()


def test_an_offer_for_an_earlier_start_of_the_engine_is_refused_at_once(world: World) -> None:
    """Whatever the transfer is called, and whether it was announced: the pages that were meant are gone."""
    world.announce("t")
    world.ask("t", to_engine="prefill, before it was restarted")
    world.settle()

    (outcome,) = world.outcomes()

    assert outcome.cause is TransferCause.STALE_TRANSFER
    assert world.sender.wanted() == {}
    assert world.sender.take_stale_offers() == 1
    assert world.sender.take_stale_offers() == 0


@pytest.mark.parametrize("bytes_move", [True, False], ids=["nothing on the wire", "pages on the wire"])
def test_pages_that_changed_hands_are_not_shipped_and_the_receiver_is_told(
    world: World, bytes_move: bool
) -> None:
    world.start("t", pages=2)
    world.ship("t", 0, 1)
    world.settle(bytes_move=bytes_move)

    world.sender.stale("t")
    world.settle()

    (outcome,) = world.outcomes()
    assert (outcome.cause, outcome.groups) == (TransferCause.STALE_TRANSFER, ())
    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_an_unknown_transfer_is_refused_when_no_announcement_comes(world: World) -> None:
    world.ask("guess", deadline_s=300.0)
    world.settle()
    assert world.receiver.take() == []

    world.pass_time(61)

    (outcome,) = world.outcomes()
    assert outcome.cause is TransferCause.UNKNOWN_TRANSFER
    assert world.quiet()


def test_a_transfer_can_be_fetched_once(world: World) -> None:
    """A replayed ticket never yields the pages of whoever has them now."""
    world.start("t", pages=1)
    world.ship("t", 0, 1)
    world.settle()
    world.outcomes()

    world.ask("t", pages=1, deadline_s=300.0)
    world.settle()

    (outcome,) = world.outcomes()
    assert outcome.cause is TransferCause.UNKNOWN_TRANSFER


def test_a_second_offer_while_the_first_is_served_is_refused_and_the_first_completes(world: World) -> None:
    world.start("t", pages=1)
    again = next(msg for msg in world.heard_by_sender if isinstance(msg, m.Offer))

    world.sender.on_message(b"other-route", again)
    refusal = world.to_receiver.popleft()
    world.ship("t", 0, 1)
    world.settle()

    assert isinstance(refusal, m.Failed)
    assert refusal.cause is TransferCause.PROTOCOL
    assert [o.cause for o in world.outcomes()] == [None]


def test_layouts_that_differ_are_refused_naming_both_sides() -> None:
    world = World(sender_layout=replace(LAYOUT, format=WireFormat.BF16, block_size=8))
    world.start("t")

    (outcome,) = world.outcomes()

    assert outcome.cause is TransferCause.LAYOUT_MISMATCH
    failed = next(msg for msg in world.heard_by_receiver if isinstance(msg, m.Failed))
    assert "block_size: 8 != 4" in failed.detail
    assert "format: bf16 != fp32" in failed.detail


def test_a_flipped_byte_on_the_wire_fails_the_transfer(world: World) -> None:
    world.start("t", pages=2)
    world.tamper = lambda data: data.view(-1)[7].bitwise_xor_(1)
    world.ship("t", 0, 1)
    world.settle()

    (outcome,) = world.outcomes()

    assert outcome.cause is TransferCause.CHECKSUM
    assert outcome.groups == ()
    assert world.quiet()
    # Bytes that are not what was announced may mean that the two ends have lost step: a new link begins anew.
    world.tamper = None
    world.start("next", pages=1)
    data = world.ship("next", 0, 1)
    world.settle()
    (outcome,) = world.outcomes()
    assert torch.equal(outcome.groups[0].data, data)
    assert "link1" in world.links


@pytest.mark.parametrize("first_page", [1, 2])
def test_pages_out_of_order_are_never_taken_for_the_expected_ones(world: World, first_page: int) -> None:
    world.start("t", pages=3)
    world.ship("t", first_page, 1)
    world.settle()

    (outcome,) = world.outcomes()

    assert outcome.cause is TransferCause.PROTOCOL
    assert world.quiet()


def test_cancel_in_mid_transfer_takes_the_bytes_off_the_wire_before_it_is_over(world: World) -> None:
    """The next transfer on the same link must not receive what was left of this one."""
    world.start("a", pages=2)
    world.ship("a", 0, 1)
    world.settle(bytes_move=False)
    world.receiver.cancel("a")
    world.settle(bytes_move=False)

    assert [o.cause for o in world.receiver.take()] == [TransferCause.CANCELLED]
    assert not world.quiet()
    data = world.carry("b")
    (outcome,) = world.outcomes()
    assert torch.equal(outcome.groups[0].data, data)
    assert world.quiet()


def test_pages_of_a_cancelled_transfer_are_released_at_once(world: World) -> None:
    world.start("t")

    world.receiver.cancel("t")
    world.settle()

    assert world.sender.take_closed() == ["t"]


def test_decode_that_needs_nothing_frees_the_pages_before_or_after_the_announcement(world: World) -> None:
    world.decline("early")
    world.settle()
    world.announce("early")
    world.announce("late")
    world.decline("late")
    world.settle()

    assert sorted(world.sender.take_closed()) == ["early", "late"]
    assert world.quiet()


def test_a_stranger_cannot_abort_a_transfer(world: World) -> None:
    world.start("t", pages=1)

    world.sender.on_message(b"x", m.Abort(transfer_id="t", engine_id="stranger"))
    world.ship("t", 0, 1)
    world.settle()

    assert [o.cause for o in world.outcomes()] == [None]


def test_prefill_request_that_ends_early_fails_the_receive_at_once(world: World) -> None:
    world.start("t", pages=3)
    world.ship("t", 0, 1)
    world.settle()

    world.sender.gone("t")
    world.settle()

    assert [o.cause for o in world.outcomes()] == [TransferCause.PREFILL_ENDED]
    assert world.quiet()


def test_a_lost_link_fails_its_transfers_and_the_next_one_gets_a_new_link(world: World) -> None:
    world.start("a")
    world.links["link0"].break_down()
    world.settle()
    assert [o.cause for o in world.outcomes()] == [TransferCause.LINK_DOWN]

    world.carry("b")

    assert [o.cause for o in world.outcomes()] == [None]
    assert set(world.links) == {"link0", "link1"}


def test_a_silent_sender_fails_the_receive_at_its_deadline_and_its_link_after_the_drain_time(
    world: World,
) -> None:
    world.lose_messages = True
    world.ask("t", deadline_s=5.0)
    world.settle()

    world.pass_time(5)
    assert [o.cause for o in world.outcomes()] == [TransferCause.DEADLINE]
    world.pass_time(9)
    assert not world.quiet(), "the wire may still write into staging"
    assert not world.links["link0"].broken

    world.pass_time(1)
    assert world.quiet()
    assert world.links["link0"].broken


def test_a_receiver_that_never_asks_does_not_hold_pages_past_the_deadline(world: World) -> None:
    world.announce("t", deadline_s=5.0)
    world.settle()

    world.pass_time(5)

    assert world.sender.take_closed() == ["t"]
    assert world.quiet()


def test_gathering_pauses_while_enough_bytes_wait_for_the_wire(world: World) -> None:
    world.start("t", pages=3)
    big = torch.zeros(1 << 20, dtype=torch.uint8)
    world.sender.ship("unknown", 0, 1, big, fence=None)

    assert world.sender.wanted() == {}
    world.settle()
    assert set(world.sender.wanted()) == {"t"}


def test_bytes_that_nobody_waits_for_are_not_allocated_without_bound(world: World) -> None:
    world.start("t", pages=1)
    stray = m.Sent(transfer_id="other", first_page=0, pages=1 << 40, wire_bytes=1 << 50, checksum=0)

    world.receiver.on_message(ADDRESS, stray)
    world.settle()

    assert world.links["link0"].broken
    assert [o.cause for o in world.outcomes()] == [TransferCause.PROTOCOL]
