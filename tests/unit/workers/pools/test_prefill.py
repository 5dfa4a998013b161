import asyncio

import pytest

from kv_transfer.api import Role, Ticket
from tests.support.engines import ScriptedEngine
from tests.support.replicas import Bench, a_prefill
from workers.api import FaultKind, PrefillResult, WorkerFault
from workers.engine.base import EngineFault


async def test_prefill_announces_the_transfer_for_one_decode_engine() -> None:
    bench = Bench(ScriptedEngine(steps=((9,),), cached_tokens=48))
    replica = await bench.prefill_replica()

    result = await replica.prefill(a_prefill(decode_engine="d5", deadline_s=12.0))

    assert result == PrefillResult(cached_tokens=48, seconds=0.0)
    assert bench.engine.tickets["r1"] == Ticket(
        transfer_id="ab" * 16, role=Role.SEND, peer_engine="d5", deadline_s=12.0
    )


async def test_cancelling_prefill_aborts_in_the_engine() -> None:
    bench = Bench(ScriptedEngine(hang_after=0))
    replica = await bench.prefill_replica()
    call = asyncio.create_task(replica.prefill(a_prefill()))
    await bench.engine.reached.wait()

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert bench.engine.aborted == ["r1"]


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        (ScriptedEngine(hang_after=0), FaultKind.DEADLINE),
        (ScriptedEngine(fail_with=EngineFault(FaultKind.ENGINE_DEAD, "gone")), FaultKind.ENGINE_DEAD),
        (ScriptedEngine(fail_with=SystemExit(1)), FaultKind.INTERNAL),
    ],
)
async def test_prefill_failures_are_values(engine: ScriptedEngine, kind: FaultKind) -> None:
    replica = await Bench(engine).prefill_replica()

    answer = await replica.prefill(a_prefill(deadline_s=0.01 if kind is FaultKind.DEADLINE else 30.0))

    assert isinstance(answer, WorkerFault)
    assert answer.kind is kind


async def test_pages_that_nobody_will_fetch_are_released_in_the_engine() -> None:
    bench = Bench(ScriptedEngine())
    replica = await bench.prefill_replica()

    assert await replica.release("t1") is None
    assert bench.engine.released == ["t1"]

    bench.engine.silent = True
    answer = await replica.release("t2")
    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.ENGINE_DEAD
