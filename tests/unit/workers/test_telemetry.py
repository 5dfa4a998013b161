import asyncio

import pytest

from kv_transfer.api import (
    HandoffOutcome,
    HandoffReport,
    IntegrityCause,
    PageFault,
    StartReport,
    TransferCause,
)
from tests.support.replicas import Bench, a_decode, a_prefill
from tests.support.spans import SpanBook, parent_id, span_id, trace_id
from workers.api import DecodeResult, FaultKind, PrefillResult
from workers.engine.base import EngineFault
from workers.telemetry import Telemetry

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def book() -> SpanBook:
    return SpanBook()


@pytest.fixture
def bench(book: SpanBook) -> Bench:
    bench = Bench()
    bench.telemetry = Telemetry(book.tracer, now=bench.clock.now, wall_ns=lambda: 5_000_000_000)
    return bench


async def test_prefill_is_a_child_of_the_request(bench: Bench, book: SpanBook) -> None:
    replica = await bench.prefill_replica()
    assert isinstance(await replica.prefill(a_prefill(traceparent=SAMPLED)), PrefillResult)
    await replica.stop()

    span = book["prefill"]
    assert (trace_id(span), parent_id(span)) == (TRACE, PARENT)
    assert dict(span.attributes or {}) == {
        "phasegate.request_id": "r1",
        "phasegate.prompt_tokens": 3,
        "phasegate.cached_tokens": 0,
    }


async def test_transfer_is_a_child_of_decode_at_the_engines_own_times(bench: Bench, book: SpanBook) -> None:
    bench.engine.handoff = HandoffReport(
        outcome=HandoffOutcome.SHIPPED, pages=2, wire_bytes=64, seconds=0.5, started_at=99.0
    )
    replica = await bench.decode_replica()
    done = await replica.decode(a_decode(traceparent=SAMPLED, transfer_id="ee" * 16, prefill_engine="p1"))
    assert isinstance(done, DecodeResult)
    await replica.stop()

    decode, transfer = book["decode"], book["transfer"]
    assert parent_id(decode) == PARENT
    assert parent_id(transfer) == span_id(decode)
    # The clock stands at 100 s where the wall clock shows 5 s: 99 s is 4 s.
    assert (transfer.start_time, transfer.end_time) == (4_000_000_000, 4_500_000_000)
    assert transfer.attributes == {
        "phasegate.outcome": "shipped",
        "phasegate.pages": 2,
        "phasegate.wire_bytes": 64,
    }
    assert [event.name for event in decode.events] == ["first_token", "last_token"]
    ticket = bench.engine.tickets["r1"]
    assert ticket is not None
    assert ticket.traceparent == f"00-{TRACE}-{span_id(decode)}-01"


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_page_fault_that_ends_a_request_is_an_event_of_its_span(
    phase: str, bench: Bench, book: SpanBook
) -> None:
    fault = PageFault(IntegrityCause.FREED, 7, 0x10, 0x20)
    bench.engine.fail_with = EngineFault(FaultKind.PAGE_INTEGRITY, "freed", fault)
    if phase == "prefill":
        await (await bench.prefill_replica()).prefill(a_prefill(traceparent=SAMPLED))
    else:
        await (await bench.decode_replica()).decode(a_decode(traceparent=SAMPLED))

    (event,) = (event for event in book[phase].events if event.name == "page_integrity_fault")
    assert event.attributes == {
        "phasegate.cause": "freed",
        "phasegate.page": 7,
        "phasegate.expected": "0x10",
        "phasegate.found": "0x20",
    }
    assert (book[phase].attributes or {})["phasegate.fault"] == "page_integrity"


async def test_what_the_engine_tells_first_is_told_at_once_and_only_once(
    bench: Bench, book: SpanBook
) -> None:
    report = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=2, wire_bytes=64, seconds=0.5)
    bench.engine.start_report = StartReport(queued_s=0.25, handoff=report)
    bench.engine.handoff = report
    bench.engine.hang_after = 1
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode(traceparent=SAMPLED)))
    await bench.engine.reached.wait()

    assert book.names == ["transfer"]
    assert bench.board["tcp://g1"].items[0].handoff == report
    call.cancel()
    await asyncio.wait([call])
    bench.engine.hang_after = None
    await replica.decode(a_decode("r2", traceparent=SAMPLED))
    await replica.stop()

    assert book.names == ["transfer", "decode", "transfer", "decode"]
    assert [item.handoff for item in bench.board["tcp://g1"].items] == [report, report, None, None]
    page = (await replica.metrics()).decode()
    assert 'phasegate_transfers_total{cause="",outcome="shipped"} 2.0' in page
    assert "phasegate_engine_queue_seconds_sum 0.5" in page


async def test_a_transfer_that_failed_says_why(bench: Bench, book: SpanBook) -> None:
    bench.engine.handoff = HandoffReport(outcome=HandoffOutcome.RECOMPUTED, cause=TransferCause.CHECKSUM)
    replica = await bench.decode_replica()
    await replica.decode(a_decode(traceparent=SAMPLED))
    await replica.stop()

    assert book["transfer"].status.description == "checksum"
    assert book["decode"].status.is_ok


async def test_a_fault_is_on_the_span_by_its_kind_and_its_text_is_not(bench: Bench, book: SpanBook) -> None:
    bench.engine.fail_with = EngineFault(FaultKind.INTERNAL, "secret words")
    replica = await bench.decode_replica()
    await replica.decode(a_decode(traceparent=SAMPLED))
    await replica.stop()

    assert book["decode"].status.description == "internal"
    assert "secret words" not in book["decode"].to_json()


async def test_a_cancelled_call_leaves_a_span_that_says_so(bench: Bench, book: SpanBook) -> None:
    bench.engine.hang_after = 1
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode(traceparent=SAMPLED)))
    await bench.engine.reached.wait()
    call.cancel()
    await asyncio.wait([call])
    await replica.stop()

    assert call.cancelled()
    assert (book["decode"].attributes or {})["phasegate.cancelled"] is True


@pytest.mark.parametrize("traceparent", [UNSAMPLED, "", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
async def test_a_request_that_is_not_sampled_leaves_no_span(
    bench: Bench, book: SpanBook, traceparent: str
) -> None:
    replica = await bench.decode_replica()
    assert isinstance(await replica.decode(a_decode(traceparent=traceparent)), DecodeResult)
    await replica.stop()

    assert book.spans == []


async def test_the_trace_of_an_unsampled_request_still_goes_on_for_the_logs(bench: Bench) -> None:
    replica = await bench.prefill_replica()
    await replica.prefill(a_prefill(traceparent=UNSAMPLED))
    await replica.stop()

    ticket = bench.engine.tickets["r1"]
    assert ticket is not None
    assert ticket.traceparent == UNSAMPLED
