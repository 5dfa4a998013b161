"""A replica that is told to stop: nothing new, a grace for who is inside, then a fault that says so."""

import asyncio
from typing import Any

import pytest

from tests.support.engines import ScriptedEngine
from tests.support.replicas import Bench, a_decode, a_prefill, settle
from workers.api import DecodeResult, FaultKind, WorkerFault
from workers.pools.replica import Replica


async def with_a_call(bench: Bench, phase: str) -> tuple[Replica, asyncio.Task[Any]]:
    """A replica of the phase, and a call that its engine has begun and holds."""
    replica: Replica
    if phase == "decode":
        replica = decode = await bench.decode_replica()
        call: asyncio.Task[Any] = asyncio.create_task(decode.decode(a_decode()))
    else:
        replica = prefill = await bench.prefill_replica()
        call = asyncio.create_task(prefill.prefill(a_prefill()))
    await bench.engine.reached.wait()
    return replica, call


@pytest.mark.parametrize("phase", ["decode", "prefill"])
async def test_who_is_inside_when_the_grace_ends_ends_with_a_fault_and_is_aborted(phase: str) -> None:
    bench = Bench(ScriptedEngine(hang_after=1))
    replica, call = await with_a_call(bench, phase)

    await replica.drain(0.01)

    answer = await call
    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.DRAINING
    assert bench.engine.aborted == ["r1"]
    assert (await replica.status()).inside == 0


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("end", ["answered", "cancelled"])
async def test_who_has_left_is_not_remembered(phase: str, end: str) -> None:
    bench = Bench(ScriptedEngine(hang_after=1))
    replica, call = await with_a_call(bench, phase)
    if end == "answered":
        bench.engine.go_on.set()
    else:
        call.cancel()
    await asyncio.wait([call])

    assert (await replica.status()).inside == 0
    assert replica._places.end(FaultKind.DRAINING, "", lambda _: True) == 0


async def test_who_is_inside_finishes_within_the_grace_and_nobody_new_enters() -> None:
    bench = Bench(ScriptedEngine(hang_after=1))
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode()))
    await bench.engine.reached.wait()
    draining = asyncio.create_task(replica.drain(60))
    await settle()

    refused = await replica.decode(a_decode("r2"))
    assert isinstance(refused, WorkerFault)
    assert refused.kind is FaultKind.DRAINING
    assert not draining.done()
    bench.engine.go_on.set()
    assert isinstance(await call, DecodeResult)
    await draining


async def test_a_replica_that_drains_keeps_beating() -> None:
    """A gateway takes a silent replica for dead, and would end what is being finished."""
    bench = Bench()
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")
    await replica.drain(1)

    await bench.clock.tick(0.5)

    assert len(bench.board["tcp://g1"].frames) == 1
