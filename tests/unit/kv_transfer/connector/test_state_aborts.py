"""A request that goes away in any state of either transfer table: nothing is remembered, nothing is kept.

Both ends run for real; messages, bytes and time move when a test says so.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from kv_transfer.protocol.recv_session import State as Recv
from kv_transfer.protocol.send_session import State as Send
from tests.support.transfer_world import World

ABORTS = 20
PAGES = 3

Bring = Callable[[World, str], None]
Leave = Callable[[World, str], None]


def announced(world: World, name: str) -> None:
    world.announce(name)
    world.settle()


def queued(world: World, name: str) -> None:
    """Another transfer has all of decode's staging."""
    agreed(world, f"{name}-first")
    world.announce(name)
    world.ask(name, pages=PAGES)
    world.settle()


def offered(world: World, name: str) -> None:
    world.ask(name, pages=PAGES)
    world.settle()


def agreed(world: World, name: str) -> None:
    world.start(name, pages=PAGES)


def on_the_wire(world: World, name: str) -> None:
    world.start(name, pages=PAGES)
    world.ship(name, 0, PAGES)
    world.settle(bytes_move=False)


def arrived(world: World, name: str) -> None:
    world.start(name, pages=PAGES)
    world.ship(name, 0, PAGES)
    world.settle()


def unwanted(world: World, name: str) -> None:
    on_the_wire(world, name)
    world.receiver.cancel(name)
    world.settle(bytes_move=False)


def decode_leaves(world: World, name: str) -> None:
    """Its client is gone: an open receive is cancelled, a request without one declines."""
    if name in world.receiver._receives:
        world.receiver.cancel(name)
    else:
        world.decline(name)


def prefill_leaves(world: World, name: str) -> None:
    """Its request was aborted: its pages belong to others from now on."""
    world.sender.gone(name)


def both_leave(world: World, name: str) -> None:
    prefill_leaves(world, name)
    decode_leaves(world, name)


CASES: dict[str, tuple[Bring, Send | None, Recv | None]] = {
    "announced": (announced, Send.ANNOUNCED, None),
    "announced and queued": (queued, Send.ANNOUNCED, Recv.QUEUED),
    "parked and offered": (offered, Send.PARKED, Recv.OFFERED),
    "sending and receiving": (agreed, Send.SENDING, Recv.RECEIVING),
    "bytes on the wire": (on_the_wire, Send.SENDING, Recv.RECEIVING),
    "flushed and arrived": (arrived, Send.FLUSHED, Recv.ARRIVED),
    "stopping and draining": (unwanted, Send.STOPPING, Recv.DRAINING),
}
reached: Counter[Send | Recv] = Counter()


def states(world: World, name: str) -> tuple[Send | None, Recv | None]:
    send, receive = world.sender._sends.get(name), world.receiver._receives.get(name)
    return (send.state if send else None), (receive.state if receive else None)


@pytest.mark.parametrize("leave", [decode_leaves, prefill_leaves, both_leave])
@pytest.mark.parametrize("case", CASES)
def test_what_leaves_in_a_state_is_forgotten_on_both_sides(case: str, leave: Leave) -> None:
    bring, send, receive = CASES[case]
    world = World(staging_pages=PAGES)
    for number in range(ABORTS):
        name = f"t{number}"
        bring(world, name)
        assert states(world, name) == (send, receive)
        reached.update(state for state in (send, receive) if state is not None)

        leave(world, name)
        world.settle()
        world.outcomes()
        # What one side alone cannot know ends with the time that the other has for it.
        world.pass_time(61.0)
        world.outcomes()

        assert world.quiet(), states(world, name)
    assert world.sender._staged_bytes == 0
    assert world.sender.wanted() == {}
    if send is not Send.PARKED:
        closed = [name for name in world.sender.take_closed() if not name.endswith("-first")]
        assert closed == [f"t{number}" for number in range(ABORTS)]

    arrived(world, "next")
    (outcome,) = world.outcomes()
    assert outcome.cause is None
    assert world.quiet()


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("announced")])
def test_a_client_that_leaves_ends_its_transfer_without_waiting_for_any_time_to_pass(case: str) -> None:
    world = World(staging_pages=PAGES)
    CASES[case][0](world, "t")

    decode_leaves(world, "t")
    world.settle()
    world.outcomes()

    assert world.quiet(), states(world, "t")


def test_every_state_in_which_something_is_held_was_reached() -> None:
    """Last in the file."""
    expected = {*Send, *Recv} - {Send.CLOSED, Recv.CLOSED}

    assert set(reached) == expected
    assert min(reached.values()) >= ABORTS
