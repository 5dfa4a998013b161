import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.support.replicas import RecordedSink, SinkBoard, settle
from workers.api import Gauges, Item
from workers.bus.publisher import FORGET_AFTER_BEATS, Publisher

GAUGES = Gauges(free_pages=1, running=2, waiting=3)


def an_item(request_id: str, index: int = 0) -> Item:
    return Item(request_id=request_id, attempt=0, first_index=index, token_ids=(index,))


async def test_items_of_one_pass_leave_as_one_frame_per_gateway() -> None:
    board = SinkBoard()
    bus = Publisher("e", board.open)
    bus.attach("g1", "a1")
    bus.attach("g2", "a2")

    async def produce(gateway: str, request_id: str) -> None:
        bus.publish(gateway, an_item(request_id))

    await asyncio.gather(*(produce(g, f"{g}-{n}") for g in ("g1", "g2") for n in range(5)))
    await bus.flushed()

    assert [len(frame.items) for frame in board["a1"].frames] == [5]
    assert [len(frame.items) for frame in board["a2"].frames] == [5]


async def test_a_full_queue_to_one_gateway_delays_no_other() -> None:
    board = SinkBoard(stuck=RecordedSink(room=1))
    bus = Publisher("e", board.open)
    bus.attach("g1", "stuck")
    bus.attach("g2", "fine")

    for index in range(5):
        bus.publish("g1", an_item("slow", index))
        bus.publish("g2", an_item("fast", index))
        await bus.flushed()

    assert board["fine"].tokens_of("fast") == [0, 1, 2, 3, 4]
    assert board["stuck"].tokens_of("slow") == [0]
    assert bus.dropped_items == 4
    assert bus.bus_queue == 0


async def test_items_count_as_queued_until_their_pass_ends() -> None:
    bus = Publisher("e", SinkBoard().open)
    bus.attach("g1", "a1")

    bus.publish("g1", an_item("r"))
    bus.publish("g1", an_item("r", 1))
    assert bus.bus_queue == 2
    await bus.flushed()
    assert bus.bus_queue == 0


async def test_a_gateway_that_stays_away_is_forgotten_and_one_that_returns_is_not() -> None:
    board = SinkBoard()
    bus = Publisher("e", board.open)
    bus.attach("gone", "a1")
    bus.attach("back", "a2")
    board["a1"].here = board["a2"].here = False

    for _ in range(FORGET_AFTER_BEATS - 1):
        bus.heartbeat(GAUGES)
    board["a2"].here = True
    bus.heartbeat(GAUGES)

    assert bus.gateways == ("back",)
    assert board["a1"].closed
    assert [frame.gauges for frame in board["a2"].frames] == [GAUGES]
    bus.publish("gone", an_item("r"))
    assert bus.dropped_items == 1


async def test_a_gateway_under_a_new_address_gets_a_new_connection() -> None:
    board = SinkBoard()
    bus = Publisher("e", board.open)
    bus.attach("g1", "old")

    bus.attach("g1", "new")
    bus.publish("g1", an_item("r"))
    await bus.flushed()

    assert board["old"].closed
    assert board["new"].tokens_of("r") == [0]


async def test_closing_closes_every_connection() -> None:
    board = SinkBoard()
    bus = Publisher("e", board.open)
    bus.attach("g1", "a1")
    bus.publish("g1", an_item("r"))

    bus.close()
    await settle()

    assert board["a1"].closed
    assert bus.gateways == ()


@given(st.lists(st.tuples(st.sampled_from(["g1", "g2"]), st.booleans()), max_size=30))
def test_items_arrive_once_and_in_order_however_passes_fall(script: list[tuple[str, bool]]) -> None:
    async def run() -> None:
        board = SinkBoard()
        bus = Publisher("e", board.open)
        bus.attach("g1", "g1")
        bus.attach("g2", "g2")
        sent: dict[str, list[int]] = {"g1": [], "g2": []}
        for index, (gateway, end_pass) in enumerate(script):
            bus.publish(gateway, an_item("r", index))
            sent[gateway].append(index)
            if end_pass:
                await bus.flushed()
        await bus.flushed()
        assert {name: board[name].tokens_of("r") for name in sent} == sent

    asyncio.run(run())
