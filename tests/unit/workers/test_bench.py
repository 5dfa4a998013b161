"""The way that the token bus is measured against gives the same answers."""

from contextlib import aclosing

from tests.support.engines import ScriptedEngine
from tests.support.replicas import Bench, a_decode, settle
from workers.api import DecodeResult, FaultKind, FinishReason, WorkerFault
from workers.api.bus import decode_item
from workers.bench import HandleDecode
from workers.engine.base import EngineFault


async def a_replica(engine: ScriptedEngine) -> HandleDecode:
    bench = Bench(engine)
    replica = HandleDecode(bench.config, bench.parts("d1"))
    await replica.start()
    return replica


async def test_items_come_in_order_and_the_result_last() -> None:
    engine = ScriptedEngine(steps=((1,), (2, 3), (4,)), finish=FinishReason.LENGTH, cached_tokens=16)
    replica = await a_replica(engine)

    *parts, result = [part async for part in replica.stream(a_decode())]

    items = [decode_item(part) for part in parts if isinstance(part, bytes)]
    assert [(item.first_index, item.token_ids) for item in items] == [(0, (1,)), (1, (2, 3)), (3, (4,))]
    assert [item.finish for item in items] == [None, None, FinishReason.LENGTH]
    assert isinstance(result, DecodeResult)
    assert (result.output_tokens, result.finish_reason, result.cached_tokens) == (4, FinishReason.LENGTH, 16)
    await replica.stop()


async def test_a_failing_engine_ends_the_stream_with_a_fault() -> None:
    replica = await a_replica(ScriptedEngine(fail_with=EngineFault(FaultKind.ENGINE_DEAD, "scripted")))

    parts = [part async for part in replica.stream(a_decode())]

    assert isinstance(parts[-1], WorkerFault)
    assert parts[-1].kind is FaultKind.ENGINE_DEAD
    await replica.stop()


async def test_a_replica_that_is_full_refuses_with_a_fault() -> None:
    replica = await a_replica(ScriptedEngine())
    await replica.stop()

    parts = [part async for part in replica.stream(a_decode())]

    assert [part.kind for part in parts if isinstance(part, WorkerFault)] == [FaultKind.DRAINING]


async def test_closing_the_stream_early_aborts_and_gives_the_place_back() -> None:
    engine = ScriptedEngine()
    replica = await a_replica(engine)

    async with aclosing(replica.stream(a_decode())) as parts:
        async for _ in parts:
            break
    await settle()

    assert engine.aborted == ["r1"]
    for _ in range(10):
        assert len([part async for part in replica.stream(a_decode())]) == 4
    await replica.stop()
