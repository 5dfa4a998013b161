"""What prefill and decode replicas have in common: start and end, the bus, gauges, health."""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from kv_transfer.api import Contract, EngineGauges, LedgerSnapshot, Membership
from kv_transfer.testing.holds import Holds, NoHolds, holds_in
from workers.api import (
    FaultKind,
    Gauges,
    IntegrityCounts,
    Phase,
    ReplicaInfo,
    ReplicaIntegrity,
    ReplicaStatus,
    WorkerFault,
)
from workers.bus.publisher import Publisher
from workers.bus.sink import OpenSink, ZmqSink
from workers.engine.base import Engine, EngineFault
from workers.pools.config import ReplicaConfig
from workers.pools.lifecycle import Intake, Refusal, Stage
from workers.pools.places import Places
from workers.pools.registry import PeerRegistry, RayRegistry
from workers.profile.fingerprint import contract_of
from workers.telemetry import Telemetry, Work

HEARTBEAT_S: Final = 0.5
SILENCE_S: Final = 5.0
"""Heartbeats stop when the engine has not answered for so long: then the replica is dead to its gateways."""
WITHDRAW_S: Final = 2.0
"""Longest that a replica which ends waits for the registry."""
QUEUE_FACTOR: Final = 4
"""Requests taken in, in multiples of the engine's batch; the engine queues what it cannot compute yet."""

_FAULT_OF: Final = {
    Refusal.STARTING: FaultKind.BUSY,
    Refusal.BUSY: FaultKind.BUSY,
    Refusal.DRAINING: FaultKind.DRAINING,
    Refusal.STOPPED: FaultKind.DRAINING,
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a replica is built from; tests pass their own."""

    engine: Engine
    engine_id: str
    replica_id: str
    contract: Contract
    """Of the folder that the engine loads."""
    read_contract: Callable[[], Contract]
    """Of the same folder as it is now."""
    registry: PeerRegistry
    open_sink: OpenSink
    now: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    holds: Holds = field(default_factory=NoHolds)
    """Barriers on purpose, for tests."""
    telemetry: Telemetry = field(default_factory=Telemetry)


def real_parts(
    config: ReplicaConfig, phase: Phase, replica_id: str, telemetry: Telemetry, membership: Membership
) -> Parts:
    """The profile's engine, ZeroMQ and Ray's key-value store.

    Raises:
        ModelFolderError: the model folder says nothing of its model, or nothing that can be read.
        ScaleFileError: the profile's scale file cannot be used.
    """
    engine_id = secrets.token_hex(16)
    read_contract = partial(contract_of, config.model_profile(), Path(config.model_dir))
    contract = read_contract()
    log.info("%s replica %s: contract %s", phase, replica_id, contract.short)
    return Parts(
        engine=_engine(config, phase, engine_id, membership, replica_id, contract=contract),
        engine_id=engine_id,
        replica_id=replica_id,
        contract=contract,
        read_contract=read_contract,
        registry=RayRegistry(),
        open_sink=partial(ZmqSink, membership=membership),
        holds=holds_in(config.holds()),
        telemetry=telemetry,
    )


def _engine(
    config: ReplicaConfig,
    phase: Phase,
    engine_id: str,
    membership: Membership,
    replica_id: str,
    *,
    contract: Contract,
) -> Engine:
    profile = config.model_profile()
    if profile.engine == "scripted":
        from workers.engine.scripted import ScriptedEngine

        return ScriptedEngine(profile, phase, model_dir=config.model_dir)
    from workers.engine.vllm_engine import VllmEngine

    return VllmEngine(
        profile,
        phase,
        model_dir=config.model_dir,
        engine_id=engine_id,
        host=config.host,
        device=config.device,
        contract=contract,
        membership=membership,
        faults=config.connector_faults(),
        log_file=str(Path(config.logs) / f"engine-{phase}-{replica_id}.log") if config.logs else "",
    )


class Replica:
    """Base of both pools. `await start()` before the first call, `await stop()` at the end.

    Every method takes `to`, which is for the router alone: the replica that the caller has chosen.
    """

    phase: Phase

    def __init__(self, config: ReplicaConfig, parts: Parts) -> None:
        profile = config.model_profile()
        self._part = profile.phase(self.phase)
        self._device = config.device
        self._started_at = 0
        self._parts = parts
        self._engine = parts.engine
        self._intake = Intake(self._part.max_sequences * QUEUE_FACTOR)
        self._places = Places()
        self._bus = Publisher(parts.engine_id, parts.open_sink, drop=config.drop())
        self._beating: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Return when the engine takes requests and its peers can find it.

        Raises:
            EngineFault: it did not come up.
        """
        try:
            await self._engine.start()
            await self._check_folder()
            gauges = await self._engine.gauges()
            await self._parts.registry.publish(self._parts.engine_id, gauges.control_addresses)
        except BaseException:
            self._intake.move(Stage.STOPPED)
            await self._engine.close()
            raise
        self._intake.move(Stage.READY)
        self._started_at = self._parts.wall_ns() // 10**9
        self._beating = asyncio.create_task(self._beat(gauges))
        log.info("%s replica %s ready, engine %s", self.phase, self._parts.replica_id, self._parts.engine_id)

    async def _check_folder(self) -> None:
        """Loading takes a while: what is in the engine now must be what its contract says."""
        now = await asyncio.to_thread(self._parts.read_contract)
        if changed := self._parts.contract.change(now, meanwhile="loading it"):
            raise EngineFault(FaultKind.ENGINE_DEAD, changed)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new; return when nobody is inside. After `grace_s` who is left ends with a fault."""
        if self._intake.stage is Stage.READY:
            self._intake.move(Stage.DRAINING)
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            cut = self._places.end(FaultKind.DRAINING, "the replica stops", lambda _: True)
            log.warning("%s replica %s stops: %d requests cut", self.phase, self._parts.replica_id, cut)
            await self._idle.wait()

    async def stop(self) -> None:
        """End the engine. Requests still inside end with a fault. May be called twice."""
        if self._intake.stage is Stage.READY:
            self._intake.move(Stage.DRAINING)
        if self._intake.stage is not Stage.DRAINING:
            return
        self._intake.move(Stage.STOPPED)
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await self._parts.registry.withdraw(self._parts.engine_id)
        except Exception:
            # Its entry leads to nobody then, which every peer is prepared for. An engine left over is worse.
            log.exception("engine %s: not withdrawn from the registry", self._parts.engine_id)
        await self._engine.close()
        self._bus.close()

    async def attach(self, gateway_id: str, bus_address: str, *, to: str | None = None) -> ReplicaInfo:
        """Send heartbeats to this gateway from now on. Repeating it changes nothing."""
        gauges = await self._engine.gauges()
        self._bus.attach(gateway_id, bus_address)
        return ReplicaInfo(
            replica_id=self._parts.replica_id,
            engine_id=self._parts.engine_id,
            phase=self.phase,
            format=self._part.format,
            pid=os.getpid(),
            block_size=gauges.block_size,
            page_bytes=gauges.page_bytes,
            total_pages=gauges.total_pages,
            device=self._device,
            started_at=self._started_at,
            coverage=gauges.coverage,
            contract=self._parts.contract,
        )

    async def status(self, *, to: str | None = None) -> ReplicaStatus:
        gauges = await self._engine.gauges()
        return ReplicaStatus(
            id=self._parts.replica_id,
            phase=self.phase,
            format=self._part.format,
            pid=os.getpid(),
            free_pages=gauges.free_pages,
            total_pages=gauges.total_pages,
            running=gauges.running,
            waiting=gauges.waiting,
            in_flight_transfers=gauges.in_flight_transfers,
            bus_queue=self._bus.bus_queue,
            inside=self._intake.inside,
            contract=self._parts.contract.short,
            integrity=ReplicaIntegrity(
                device=self._device,
                since=self._started_at,
                coverage=gauges.coverage,
                **structs.asdict(_checked(gauges)),
            ),
        )

    async def ledger(self, *, to: str | None = None) -> LedgerSnapshot:
        """Who has which of the engine's pages."""
        return await self._engine.ledger()

    async def metrics(self, *, to: str | None = None) -> bytes:
        """This replica's metrics in Prometheus' text form."""
        gauges: EngineGauges | None = None
        with contextlib.suppress(EngineFault):
            gauges = await self._engine.gauges()
        return self._parts.telemetry.metrics.page(
            gauges, bus_queue=self._bus.bus_queue, bus_dropped=self._bus.dropped_items
        )

    async def check_health(self) -> None:
        """Serve asks now and then, and replaces the replica when this keeps raising.

        Raises:
            EngineFault: the engine is dead or silent.
        """
        await self._engine.gauges()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Serve carries this to every router."""
        return {
            "replica_id": self._parts.replica_id,
            "engine_id": self._parts.engine_id,
            "phase": str(self.phase),
            "pid": os.getpid(),
        }

    def _enter(self) -> WorkerFault | None:
        """A fault when the request is refused. Otherwise the caller owes a `_leave`."""
        refusal = self._intake.enter()
        if refusal is not None:
            self._parts.telemetry.metrics.fault(_FAULT_OF[refusal])
            return WorkerFault(kind=_FAULT_OF[refusal], detail=f"the replica is {refusal}")
        self._idle.clear()
        return None

    def _leave(self) -> None:
        self._intake.leave()
        if self._intake.inside == 0:
            self._idle.set()

    def _fault(self, request_id: str, bad: BaseException, deadline_s: float, work: Work) -> WorkerFault:
        """The fault that stands for `bad`, logged and noted on the work's span."""
        if isinstance(bad, EngineFault):
            fault = WorkerFault(kind=bad.kind, detail=bad.detail)
        elif isinstance(bad, TimeoutError):
            fault = WorkerFault(kind=FaultKind.DEADLINE, detail=f"not done within {deadline_s:g} s")
        else:
            fault = WorkerFault(kind=FaultKind.INTERNAL, detail=repr(bad))
        if isinstance(bad, EngineFault) and bad.page_fault is not None:
            work.page_fault(bad.page_fault)
        work.fail(fault.kind)
        log.warning("request %s: %s: %s", request_id, fault.kind, fault.detail)
        return fault

    async def _beat(self, gauges: EngineGauges) -> None:
        heard = self._parts.now()
        while True:
            try:
                gauges = await self._engine.gauges()
                heard = self._parts.now()
            except EngineFault as fault:
                log.warning("engine %s: %s", self._parts.engine_id, fault)
            except Exception:
                # Without heartbeats every gateway takes the replica for dead: they outlive any mistake here.
                log.exception("engine %s: no gauges", self._parts.engine_id)
            try:
                if self._parts.now() - heard < SILENCE_S and not self._engine.dead:
                    self._bus.heartbeat(_told(gauges))
                self._end_orphans()
            except Exception:
                log.exception("engine %s: heartbeat failed", self._parts.engine_id)
            await self._parts.sleep(HEARTBEAT_S)

    def _end_orphans(self) -> None:
        """A killed gateway cancels nothing: whoever it has inside would be computed for nobody."""
        gone = self._bus.away
        ended = self._places.end(
            FaultKind.INTERNAL, "the gateway is gone", lambda place: place.gateway_id in gone
        )
        if ended:
            log.warning(
                "engine %s: ended %d requests of gateways that are gone", self._parts.engine_id, ended
            )


def _told(gauges: EngineGauges) -> Gauges:
    """What a heartbeat says of the engine."""
    return Gauges(
        free_pages=gauges.free_pages,
        running=gauges.running,
        waiting=gauges.waiting,
        integrity=_checked(gauges),
    )


def _checked(gauges: EngineGauges) -> IntegrityCounts:
    return IntegrityCounts(
        steps_checked=gauges.steps_checked,
        steps_unchecked=gauges.steps_unchecked,
        pages_checked=gauges.pages_checked,
        mismatches=gauges.mismatches,
    )
