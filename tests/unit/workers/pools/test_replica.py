import os
from dataclasses import replace

import pytest

from kv_transfer.api import Contract, Coverage
from tests.support.engines import ScriptedEngine, some_gauges
from tests.support.replicas import Bench, MemoryRegistry, a_decode, settle
from workers.api import FaultKind, Gauges, IntegrityCounts, Phase, ReplicaIntegrity, WorkerFault
from workers.engine.base import EngineFault
from workers.pools.decode import DecodeReplica


async def test_a_started_replica_is_in_the_registry_and_a_stopped_one_is_not() -> None:
    bench = Bench()
    replica = await bench.decode_replica()
    assert bench.registry.engines["d1"] == ("tcp://127.0.0.1:7001",)

    await replica.stop()
    await replica.stop()

    assert "d1" not in bench.registry.engines
    assert bench.engine.closed == 1


async def test_an_engine_is_closed_also_when_the_registry_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    """A cluster's control service may die before its replicas do."""

    class Gone(MemoryRegistry):
        async def withdraw(self, engine_id: str) -> None:
            raise ConnectionError("no control service")

    bench = Bench(registry=Gone())
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")

    await replica.stop()

    assert bench.engine.closed == 1
    assert bench.board["tcp://g1"].closed
    assert "not withdrawn" in caplog.text


async def test_a_stopped_replica_refuses() -> None:
    replica = await Bench().decode_replica()
    await replica.stop()

    answer = await replica.decode(a_decode())

    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.DRAINING


async def test_a_replica_not_started_yet_refuses_as_busy() -> None:
    bench = Bench()
    replica = DecodeReplica(bench.config, bench.parts("d1"))

    answer = await replica.decode(a_decode())

    assert isinstance(answer, WorkerFault)
    assert answer.kind is FaultKind.BUSY


async def test_an_engine_that_does_not_start_is_closed_and_the_fault_is_raised() -> None:
    bench = Bench(ScriptedEngine(start_fails=True))
    replica = DecodeReplica(bench.config, bench.parts("d1"))

    with pytest.raises(EngineFault):
        await replica.start()

    assert bench.engine.closed == 1
    assert "d1" not in bench.registry.engines


async def test_attach_is_idempotent_and_tells_the_facts() -> None:
    bench = Bench(contract=Contract(rope={"theta": "7"}))
    replica = await bench.decode_replica()

    first = await replica.attach("g1", "tcp://g1")
    second = await replica.attach("g1", "tcp://g1")

    assert first == second
    assert (first.engine_id, first.phase, first.format) == ("d1", Phase.DECODE, "bf16")
    assert (first.block_size, first.total_pages, first.pid) == (16, 64, os.getpid())
    assert first.contract == bench.contract
    assert (await replica.status()).contract == bench.contract.short
    assert not bench.board["tcp://g1"].closed


async def test_every_attached_gateway_gets_heartbeats_with_gauges() -> None:
    bench = Bench()
    replica = await bench.prefill_replica()
    await replica.attach("g1", "tcp://g1")
    await replica.attach("g2", "tcp://g2")

    await bench.clock.tick(0.5)
    await bench.clock.tick(0.5)

    for address in ("tcp://g1", "tcp://g2"):
        frames = bench.board[address].frames
        assert [frame.items for frame in frames] == [(), ()]
        assert frames[0].gauges == Gauges(free_pages=60, running=0, waiting=0)
        assert frames[0].engine_id == "p9"


async def test_gateways_are_told_what_is_checked_and_what_was_found() -> None:
    coverage = Coverage(ledger="generation", checked=("a",), unchecked=("b",))
    bench = Bench()
    bench.engine.told = replace(
        some_gauges(),
        coverage=coverage,
        steps_checked=1,
        steps_unchecked=2,
        pages_checked=3,
        mismatches={"freed": 4},
    )
    replica = await bench.decode_replica()

    info = await replica.attach("g1", "tcp://g1")
    status = await replica.status()
    await bench.clock.tick(0.5)

    assert status.integrity == ReplicaIntegrity(
        device="cpu",
        since=1_700_000_000,
        coverage=coverage,
        steps_checked=1,
        steps_unchecked=2,
        pages_checked=3,
        mismatches={"freed": 4},
    )
    assert (info.device, info.started_at, info.coverage) == ("cpu", 1_700_000_000, coverage)
    (frame,) = bench.board["tcp://g1"].frames
    assert frame.gauges is not None
    assert frame.gauges.integrity == IntegrityCounts(
        steps_checked=1, steps_unchecked=2, pages_checked=3, mismatches={"freed": 4}
    )


async def test_heartbeats_outlast_a_slow_answer_but_not_a_silent_engine() -> None:
    bench = Bench()
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")
    bench.engine.silent = True

    await bench.clock.tick(4.9)
    assert len(bench.board["tcp://g1"].frames) == 1
    await bench.clock.tick(0.2)
    assert len(bench.board["tcp://g1"].frames) == 1
    bench.engine.silent = False
    await bench.clock.tick(0.5)
    assert len(bench.board["tcp://g1"].frames) == 2


async def test_a_dead_engine_sends_no_heartbeat_at_all() -> None:
    """A gateway that has seen the death would take one for life."""
    bench = Bench()
    replica = await bench.decode_replica()
    await replica.attach("g1", "tcp://g1")
    bench.engine.dead = True

    await bench.clock.tick(0.5)

    assert bench.board["tcp://g1"].frames == []


async def test_a_silent_engine_fails_the_health_check() -> None:
    bench = Bench()
    replica = await bench.decode_replica()
    await replica.check_health()
    bench.engine.silent = True

    with pytest.raises(EngineFault):
        await replica.check_health()


async def test_status_shows_gauges_of_engine_and_bus() -> None:
    replica = await Bench().decode_replica()

    status = await replica.status()

    assert (status.id, status.phase, status.free_pages) == ("replica-d1", Phase.DECODE, 60)
    assert status.bus_queue == 0


async def test_metadata_for_routers_is_plain_data() -> None:
    replica = await Bench().decode_replica()

    assert replica.record_replica_metadata() == {
        "replica_id": "replica-d1",
        "engine_id": "d1",
        "phase": "decode",
        "pid": os.getpid(),
    }
    await settle()


async def test_a_folder_that_changes_while_it_is_loaded_is_not_served() -> None:
    """What the engine has of it nobody knows."""
    bench = Bench(contract=Contract(rope={"theta": "1"}), folder=Contract(rope={"theta": "2"}))
    replica = DecodeReplica(bench.config, bench.parts("d1"))

    with pytest.raises(
        EngineFault, match="the model folder before and after loading it differ in rope: theta 1 against 2"
    ):
        await replica.start()

    assert bench.engine.closed == 1
    assert "d1" not in bench.registry.engines
