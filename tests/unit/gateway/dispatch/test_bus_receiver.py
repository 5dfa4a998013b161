import asyncio

import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch.bus_receiver import MAX_FRAME_BYTES, BusReceiver
from tests.support.members import MEMBERSHIP
from workers.api import BUS_VERSION, Frame, Item
from workers.api.bus import encode


def frame(*items: Item, version: int = BUS_VERSION) -> bytes:
    return encode(Frame(version=version, engine_id="e", items=items))


def item(request_id: str) -> Item:
    return Item(request_id=request_id, attempt=0, first_index=0, token_ids=(1,))


def test_items_go_to_their_request_and_to_nobody_after_it_left() -> None:
    bus, got = BusReceiver("127.0.0.1", lambda _: None, MEMBERSHIP), list[Item]()
    bus.subscribe("r1", got.append)

    bus.feed(frame(item("r1"), item("r2")))
    bus.unsubscribe("r1")
    bus.feed(frame(item("r1")))

    assert got == [item("r1")]
    assert bus.unclaimed == 2


def test_frame_of_another_version_is_counted_and_not_read() -> None:
    frames: list[Frame] = []
    bus, got = BusReceiver("127.0.0.1", frames.append, MEMBERSHIP), list[Item]()
    bus.subscribe("r1", got.append)

    bus.feed(frame(item("r1"), version=BUS_VERSION + 1))

    assert (got, frames, bus.malformed) == ([], [], 1)


@given(st.binary(max_size=40))
def test_no_bytes_at_all_can_stop_the_receiver(data: bytes) -> None:
    bus, got = BusReceiver("127.0.0.1", lambda _: None, MEMBERSHIP), list[Item]()
    bus.subscribe("r1", got.append)

    bus.feed(data)
    bus.feed(frame(item("r1")))

    assert got == [item("r1")]


def test_a_message_nested_beyond_all_bounds_is_ignored_like_any_other_malformed_one() -> None:
    """It once ended the task that listens to the bus: the gateway stayed up, and deaf."""
    bus = BusReceiver("127.0.0.1", lambda _: None, MEMBERSHIP)
    whole_frame_and_one_field_more = b"\x95" + bytes([BUS_VERSION]) + b"\xa1e\x90\xc0"

    bus.feed(whole_frame_and_one_field_more + b"\x91" * 200_000 + b"\xc0")

    assert bus.malformed == 1


async def test_a_member_cannot_fill_the_memory_with_one_message_nor_a_stranger_send_any() -> None:
    heard: asyncio.Queue[Frame] = asyncio.Queue()
    bus = BusReceiver("127.0.0.1", heard.put_nowait, MEMBERSHIP)
    bus.start()
    context = zmq.asyncio.Context()
    stranger, flood, member = (context.socket(zmq.PUSH) for _ in range(3))
    for socket in (flood, member):
        MEMBERSHIP.client(socket)
    for socket in (stranger, flood, member):
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(bus.address)
    try:
        await stranger.send(frame(item("stranger")), zmq.NOBLOCK)
        await flood.send(bytes(MAX_FRAME_BYTES + 1))
        await asyncio.sleep(0.3)  # for what must not arrive
        await member.send(frame(item("r1")))
        first = await asyncio.wait_for(heard.get(), 10)
    finally:
        context.destroy(linger=0)
        await bus.close()

    assert (first.items, bus.malformed) == ((item("r1"),), 0)
