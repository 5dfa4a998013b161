import asyncio

import pytest

from kv_transfer.api import HandoffOutcome, HandoffReport, Role, StartReport, Ticket, TransferCause
from tests.support.engines import ScriptedEngine
from tests.support.replicas import PROFILE, Bench, a_decode, settle
from workers.api import DecodeResult, FaultKind, FinishReason, RefetchResult, WorkerFault
from workers.engine.base import EngineFault
from workers.pools.config import ReplicaConfig


async def test_the_result_counts_exactly_the_tokens_that_went_on_the_bus() -> None:
    bench = Bench(ScriptedEngine(steps=((1,), (2, 3), (4,)), finish=FinishReason.LENGTH))
    replica = await bench.decode_replica()

    result = await replica.decode(a_decode())

    sink = bench.board["tcp://g1"]
    assert isinstance(result, DecodeResult)
    assert result.output_tokens == len(sink.tokens_of("r1")) == 4
    assert [item.first_index for item in sink.items] == [0, 1, 3]
    assert [item.finish for item in sink.items] == [None, None, FinishReason.LENGTH]
    assert result.finish_reason is FinishReason.LENGTH


async def test_the_handoff_report_and_local_hits_reach_the_caller() -> None:
    report = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=3, wire_bytes=99)
    bench = Bench(ScriptedEngine(handoff=report, cached_tokens=32))
    replica = await bench.decode_replica()

    result = await replica.decode(a_decode())

    assert isinstance(result, DecodeResult)
    assert (result.handoff, result.cached_tokens) == (report, 32)


async def test_the_last_item_was_handed_over_when_the_call_returns() -> None:
    bench = Bench(ScriptedEngine(steps=((1,),)))
    replica = await bench.decode_replica()

    await replica.decode(a_decode())

    assert bench.board["tcp://g1"].items[-1].finish is FinishReason.STOP


async def test_addresses_of_the_prefill_engine_come_from_the_registry() -> None:
    bench = Bench()
    replica = await bench.decode_replica()

    await replica.decode(a_decode(transfer_id="ab" * 16, prefill_engine="p1", deadline_s=500.0))

    assert bench.engine.tickets["r1"] == Ticket(
        transfer_id="ab" * 16,
        role=Role.RECEIVE,
        peer_engine="p1",
        peer_addresses=("tcp://127.0.0.1:7001",),
        deadline_s=60.0,
    )


async def test_without_a_transfer_decode_gets_no_ticket() -> None:
    bench = Bench()
    replica = await bench.decode_replica()

    await replica.decode(a_decode())

    assert bench.engine.tickets == {"r1": None}


async def test_an_unknown_prefill_engine_is_a_fault_and_never_reaches_the_engine() -> None:
    bench = Bench()
    replica = await bench.decode_replica()

    answer = await replica.decode(a_decode(transfer_id="ab" * 16, prefill_engine="p7"))

    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.PEER_UNKNOWN
    assert bench.engine.tickets == {}


async def test_cancelling_the_call_aborts_in_the_engine_and_frees_the_place() -> None:
    bench = Bench(ScriptedEngine(hang_after=1))
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode()))
    await bench.engine.reached.wait()

    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert bench.engine.aborted == ["r1"]
    await replica.drain(60)  # returns at once only if nobody is inside


async def test_a_request_past_its_deadline_is_aborted_in_the_engine() -> None:
    bench = Bench(ScriptedEngine(hang_after=1))
    replica = await bench.decode_replica()

    answer = await replica.decode(a_decode(deadline_s=0.01))

    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.DEADLINE
    assert bench.engine.aborted == ["r1"]


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (EngineFault(FaultKind.ENGINE_DEAD, "gone"), FaultKind.ENGINE_DEAD),
        (EngineFault(FaultKind.INVALID_REQUEST, "too long"), FaultKind.INVALID_REQUEST),
        (RuntimeError("surprise"), FaultKind.INTERNAL),
        (SystemExit(3), FaultKind.INTERNAL),
    ],
)
async def test_whatever_the_engine_raises_becomes_a_value(raised: BaseException, kind: FaultKind) -> None:
    bench = Bench(ScriptedEngine(fail_with=raised))
    replica = await bench.decode_replica()

    answer = await replica.decode(a_decode())

    assert isinstance(answer, WorkerFault)
    assert answer.kind is kind


async def test_a_full_replica_refuses_as_busy_and_a_draining_one_as_draining() -> None:
    bench = Bench(ScriptedEngine(hang_after=0))
    replica = await bench.decode_replica()
    inside = [asyncio.create_task(replica.decode(a_decode(f"r{n}"))) for n in range(4)]
    await settle()

    busy = await replica.decode(a_decode("one too many"))
    drained = asyncio.create_task(replica.drain(60))
    await settle()
    draining = await replica.decode(a_decode("too late"))

    assert isinstance(busy, WorkerFault)
    assert isinstance(draining, WorkerFault)
    assert (busy.kind, draining.kind) == (FaultKind.BUSY, FaultKind.DRAINING)
    assert not drained.done()
    for call in inside:
        call.cancel()
    await asyncio.gather(*inside, return_exceptions=True)
    await drained


async def test_tokens_of_a_live_request_can_be_fetched_again() -> None:
    bench = Bench(ScriptedEngine(steps=((11,), (12,), (13,)), hang_after=2))
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode()))
    await bench.engine.reached.wait()

    again = await replica.refetch("r1", 1)

    assert again == RefetchResult(first_index=1, token_ids=(12,))
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_tokens_of_an_ended_request_can_be_fetched_for_thirty_seconds() -> None:
    bench = Bench()
    replica = await bench.decode_replica()
    await replica.decode(a_decode())

    bench.clock.seconds += 29.9
    assert await replica.refetch("r1", 0) == RefetchResult(first_index=0, token_ids=(1, 2, 3))
    bench.clock.seconds += 0.2
    assert isinstance(await replica.refetch("r1", 0), WorkerFault)


async def test_refetch_refuses_an_unknown_request_and_a_negative_index() -> None:
    replica = await Bench().decode_replica()
    await replica.decode(a_decode())

    assert isinstance(await replica.refetch("other", 0), WorkerFault)
    assert isinstance(await replica.refetch("r1", -1), WorkerFault)


async def test_a_frame_dropped_on_purpose_leaves_a_gap_that_refetch_fills() -> None:
    config = ReplicaConfig(
        profile=PROFILE, model_dir="/models/tiny", mode="dev", testing={"drop_bus_frame": 2}
    )
    bench = Bench(ScriptedEngine(steps=((1,), (2,), (3,))), config=config)
    replica = await bench.decode_replica()

    result = await replica.decode(a_decode())

    assert isinstance(result, DecodeResult)
    assert result.output_tokens == 3
    assert bench.board["tcp://g1"].tokens_of("r1") == [1, 3]
    assert await replica.refetch("r1", 1) == RefetchResult(first_index=1, token_ids=(2, 3))


async def test_pages_refused_for_another_contract_end_the_request_before_its_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Decode would answer well as far as it knows: which of the two is wrong only a person can say."""
    apart = "prefill and decode differ in rope: theta 10000 against 100000"
    report = HandoffReport(
        outcome=HandoffOutcome.RECOMPUTED, cause=TransferCause.CONTRACT_MISMATCH, detail=apart
    )
    engine = ScriptedEngine(start_report=StartReport(queued_s=0.0, handoff=report))
    bench = Bench(engine)
    replica = await bench.decode_replica()

    answer = await replica.decode(a_decode(transfer_id="ab" * 16, prefill_engine="p1"))

    assert answer == WorkerFault(kind=FaultKind.CONTRACT_MISMATCH, detail=apart)
    assert bench.board["tcp://g1"].items == []
    await settle()
    assert engine.aborted == ["r1"]
    assert f"request r1: contract_mismatch: {apart}" in caplog.text
    page = bench.telemetry.metrics.page(None, bus_queue=0, bus_dropped=0).decode()
    assert 'phasegate_transfers_total{cause="contract_mismatch",outcome="recomputed"} 1.0' in page
    assert 'phasegate_engine_faults_total{fault="contract_mismatch"} 1.0' in page


@pytest.mark.parametrize("cause", sorted(set(TransferCause) - {TransferCause.CONTRACT_MISMATCH}))
async def test_a_transfer_that_failed_for_another_reason_leaves_an_answer(cause: TransferCause) -> None:
    report = HandoffReport(outcome=HandoffOutcome.RECOMPUTED, cause=cause)
    bench = Bench(ScriptedEngine(start_report=StartReport(queued_s=0.0, handoff=report), handoff=report))
    replica = await bench.decode_replica()

    answer = await replica.decode(a_decode(transfer_id="ab" * 16, prefill_engine="p1"))

    assert isinstance(answer, DecodeResult)
