"""What an engine replica counts."""

import asyncio
import math
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kv_transfer.api import HandoffOutcome, HandoffReport, TransferCause
from tests.support.engines import some_gauges
from tests.support.replicas import Bench, RecordedSink, SinkBoard, a_decode, a_prefill
from workers.api import FaultKind
from workers.engine.base import EngineFault
from workers.metrics import ReplicaMetrics
from workers.pools.replica import Replica


async def value(replica: Replica, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families((await replica.metrics()).decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_gauges_are_the_engines_own(bench: Bench) -> None:
    replica = await bench.decode_replica()

    assert await value(replica, "phasegate_cache_pages") == 64
    assert await value(replica, "phasegate_cache_pages_free") == 60
    assert await value(replica, "phasegate_engine_requests", state="running") == 0
    bench.engine.silent = True
    assert math.isnan(await value(replica, "phasegate_cache_pages_free"))
    await replica.stop()


async def test_a_transfer_counts_with_its_bytes_pages_and_seconds(bench: Bench) -> None:
    bench.engine.handoff = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=3, wire_bytes=96, seconds=0.5)
    replica = await bench.decode_replica()
    await replica.decode(a_decode())

    assert await value(replica, "phasegate_transfers_total", outcome="shipped", cause="") == 1
    assert await value(replica, "phasegate_transfer_bytes_total") == 96
    assert await value(replica, "phasegate_transfer_pages_total") == 3
    assert await value(replica, "phasegate_transfer_seconds_sum") == 0.5
    assert await value(replica, "phasegate_engine_call_seconds_count") == 1
    await replica.stop()


async def test_a_failed_transfer_counts_by_its_cause_and_has_no_duration(bench: Bench) -> None:
    bench.engine.handoff = HandoffReport(
        outcome=HandoffOutcome.RECOMPUTED, cause=TransferCause.DEADLINE, seconds=60
    )
    replica = await bench.decode_replica()
    await replica.decode(a_decode())

    assert await value(replica, "phasegate_transfers_total", outcome="recomputed", cause="deadline") == 1
    assert await value(replica, "phasegate_transfer_seconds_count") == 0
    await replica.stop()


async def test_faults_and_refusals_count_by_kind(bench: Bench) -> None:
    bench.engine.fail_with = EngineFault(FaultKind.INTERNAL, "x")
    replica = await bench.prefill_replica()
    await replica.prefill(a_prefill())
    await replica.stop()
    await replica.prefill(a_prefill())

    assert await value(replica, "phasegate_engine_faults_total", fault="internal") == 1
    assert await value(replica, "phasegate_engine_faults_total", fault="draining") == 1


async def test_a_cancelled_call_counts_as_such(bench: Bench) -> None:
    bench.engine.hang_after = 0
    replica = await bench.decode_replica()
    call = asyncio.create_task(replica.decode(a_decode()))
    await bench.engine.reached.wait()
    call.cancel()
    await asyncio.wait([call])

    assert await value(replica, "phasegate_engine_calls_cancelled_total") == 1
    assert await value(replica, "phasegate_engine_faults_total", fault="internal") == 0
    await replica.stop()


async def test_items_that_the_bus_dropped_are_counted_once_however_often_one_looks() -> None:
    bench = Bench(board=SinkBoard(**{"tcp://g1": RecordedSink(room=0)}))
    replica = await bench.decode_replica()
    await replica.decode(a_decode())

    assert await value(replica, "phasegate_bus_items_dropped_total") == 3
    assert await value(replica, "phasegate_bus_items_dropped_total") == 3
    assert await value(replica, "phasegate_bus_items_queued") == 0
    await replica.stop()


def test_what_the_engine_counts_of_its_pages_is_told_by_cause() -> None:
    metrics = ReplicaMetrics()
    for count in (1, 3):
        gauges = replace(
            some_gauges(), mismatches={"freed": count}, steps_checked=7, steps_unchecked=2, pages_checked=40
        )
        page = metrics.page(gauges, bus_queue=0, bus_dropped=0).decode()

    assert 'phasegate_integrity_mismatches_total{cause="freed"} 3.0' in page
    assert 'phasegate_integrity_mismatches_total{cause="shifted"} 0.0' in page
    assert "phasegate_integrity_steps_checked_total 7.0" in page
    assert "phasegate_integrity_steps_unchecked_total 2.0" in page
    assert "phasegate_integrity_pages_checked_total 40.0" in page


def test_preemptions_are_told_as_a_counter() -> None:
    metrics = ReplicaMetrics()
    for count in (2, 5):
        page = metrics.page(replace(some_gauges(), preemptions=count), bus_queue=0, bus_dropped=0).decode()

    assert "phasegate_engine_preemptions_total 5.0" in page


def test_what_the_engine_counts_on_its_control_channel_is_told_as_counters() -> None:
    metrics = ReplicaMetrics()
    for count in (2, 2, 5):
        gauges = replace(some_gauges(), malformed_messages=count, strangers_refused=1)
        page = metrics.page(gauges, bus_queue=0, bus_dropped=0).decode()

    assert "phasegate_control_messages_malformed_total 5.0" in page
    assert "phasegate_control_clients_refused_total 1.0" in page
    assert (
        "phasegate_control_messages_malformed_total 5.0"
        in metrics.page(None, bus_queue=0, bus_dropped=0).decode()
    )
