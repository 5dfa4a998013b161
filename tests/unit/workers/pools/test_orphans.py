"""Requests of a gateway that is gone, and heartbeats that outlive any mistake."""

import asyncio

import pytest

from kv_transfer.api import EngineGauges
from tests.support.engines import ScriptedEngine
from tests.support.replicas import Bench, RecordedSink, a_decode, settle
from workers.api import FaultKind, WorkerFault
from workers.bus.publisher import AWAY_AFTER_BEATS, FORGET_AFTER_BEATS
from workers.engine.base import EngineFault
from workers.pools.places import Places


async def two_gateways() -> tuple[Bench, asyncio.Task[object], asyncio.Task[object]]:
    """A replica with one endless request of each of two gateways."""
    bench = Bench(ScriptedEngine(hang_after=1))
    replica = await bench.decode_replica()
    calls = [
        asyncio.create_task(
            replica.decode(a_decode(f"r-{name}", gateway_id=name, bus_address=f"tcp://{name}"))
        )
        for name in ("g1", "g2")
    ]
    await settle()
    return bench, *calls


async def test_requests_of_a_gateway_that_is_gone_end_and_those_of_others_go_on() -> None:
    bench, lost, other = await two_gateways()
    bench.board["tcp://g1"].here = False

    for _ in range(AWAY_AFTER_BEATS):
        assert not lost.done()
        await bench.clock.tick(0.5)

    assert bench.engine.aborted == ["r-g1"]
    answer = await lost
    assert isinstance(answer, WorkerFault)
    assert "gateway" in answer.detail
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])


async def test_a_gateway_that_comes_back_in_time_keeps_its_requests() -> None:
    bench, call, other = await two_gateways()
    for _ in range(3):
        bench.board["tcp://g1"].here = False
        for _ in range(AWAY_AFTER_BEATS - 1):
            await bench.clock.tick(0.5)
        bench.board["tcp://g1"].here = True
        await bench.clock.tick(0.5)

    assert not call.done()
    for task in (call, other):
        task.cancel()
    await asyncio.wait([call, other])


def test_requests_end_before_their_gateway_is_forgotten() -> None:
    """Afterwards nobody would know that it is away."""
    assert AWAY_AFTER_BEATS < FORGET_AFTER_BEATS


async def test_a_request_ended_before_it_runs_under_its_deadline_ends_all_the_same() -> None:
    places = Places()
    place = places.take("r1", "g1")
    assert places.end(FaultKind.INTERNAL, "over", lambda _: True) == 1

    async def run() -> None:
        async with asyncio.timeout(60) as limit:
            place.under(limit)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as ended:
        await run()

    reason = place.reason(ended.value)
    assert isinstance(reason, EngineFault)
    assert reason.detail == "over"


async def test_the_first_reason_holds_and_a_real_deadline_stays_one() -> None:
    places = Places()
    ended, untouched = places.take("r1"), places.take("r2")
    places.end(FaultKind.INTERNAL, "first", lambda place: place is ended)
    assert places.end(FaultKind.DRAINING, "second", lambda place: place is ended) == 0

    late = TimeoutError()
    assert untouched.reason(late) is late
    assert str(ended.reason(late)) == "internal: first"
    places.give_back(ended)
    assert places.end(FaultKind.DRAINING, "third", lambda place: True) == 1


class Confused(ScriptedEngine):
    """Its gauges raise what no engine should."""

    confused = False

    async def gauges(self) -> EngineGauges:
        if self.confused:
            raise ZeroDivisionError
        return await super().gauges()


async def test_heartbeats_outlive_an_engine_that_raises_anything() -> None:
    engine = Confused()
    bench = Bench(engine)
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")
    engine.confused = True
    await bench.clock.tick(0.5)
    engine.confused = False

    await bench.clock.tick(0.5)
    await bench.clock.tick(0.5)

    assert len(bench.board["tcp://g1"].frames) == 3


class Raising(RecordedSink):
    def connected(self) -> bool:
        if self.here:
            return True
        raise OSError("scripted")


async def test_heartbeats_outlive_a_sink_that_raises() -> None:
    bench = Bench()
    sink = Raising("tcp://g1", here=False)
    bench.board.sinks["tcp://g1"] = sink
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")
    await bench.clock.tick(0.5)
    sink.here = True

    await bench.clock.tick(0.5)

    assert len(sink.frames) == 1
