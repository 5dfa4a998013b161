"""The replicas this gateway may use: who is attached, what they last said, what it has in them.

A shell around two sources of news: the pool's replica lists and the bus. It decides nothing about
requests; it tells their owners when a replica is lost.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from gateway.dispatch.pools import EnginePool
from gateway.metrics import LostReplica
from gateway.routing.snapshot import Candidate
from kv_transfer.api import Contract, WireFormat
from workers.api import FaultKind, Frame, Gauges, Phase, ReplicaInfo, WorkerFault

log = logging.getLogger(__name__)

TICK_S = 0.25
ATTACH_TIMEOUT_S = 10.0
REATTACH_S = 2.0
"""Between two tries with a replica that has fallen silent."""


@dataclass(slots=True)
class Member:
    info: ReplicaInfo
    heard_at: float
    gauges: Gauges | None = None
    silent: bool = False
    suspected: bool = False
    """A call ended as if the engine were dead."""
    leaving: bool = False
    """Serve lists it no more: it finishes what it has, and gets nothing new."""
    drift: str = ""
    """What it serves that is not what the gateway renders for. It gets nothing at all."""
    on_lost: dict[str, Callable[[], None]] = field(default_factory=dict)
    """By request id: the requests this gateway has in the replica."""
    promised: dict[str, int] = field(default_factory=dict)
    """By request id: pages that those need which have no token yet. The replica's own count may miss them."""

    @property
    def free_pages(self) -> int:
        known = self.gauges.free_pages if self.gauges else self.info.total_pages
        return max(0, known - sum(self.promised.values()))


class Fleet:
    """Attached replicas of both phases."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        gateway_id: str,
        contract: Contract,
        silence_s: float,
        now: Callable[[], float],
        count_lost: Callable[[LostReplica], None] = lambda _: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._pool = pool
        self._gateway_id = gateway_id
        self._contract = contract
        self._silence_s = silence_s
        self._now = now
        self._count_lost = count_lost
        self._sleep = sleep
        self._members: dict[str, Member] = {}
        self._by_engine: dict[str, Member] = {}
        self._attaching: dict[str, asyncio.Task[None]] = {}

    def ready(self) -> bool:
        """At least one replica of each phase can be used."""
        return all(self.candidates(phase) for phase in Phase)

    def candidates(self, phase: Phase) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(
                replica_id=replica_id,
                total_pages=member.info.total_pages,
                format=WireFormat(member.info.format),
                free_pages=member.free_pages,
                load=max(
                    member.gauges.running + member.gauges.waiting if member.gauges else 0, len(member.on_lost)
                ),
            )
            for replica_id, member in self._members.items()
            if member.info.phase is phase
            and not (member.drift or member.silent or member.suspected or member.leaving)
        )

    def engines(self) -> tuple[tuple[ReplicaInfo, Gauges | None], ...]:
        """Attached replicas that are heard, each with what it said last; None: nothing yet."""
        return tuple((member.info, member.gauges) for member in self._members.values() if not member.silent)

    def drifted(self) -> tuple[tuple[ReplicaInfo, str], ...]:
        """Attached replicas that serve something else than this gateway, each with what differs."""
        return tuple((member.info, member.drift) for member in self._members.values() if member.drift)

    def count_drifted(self, phase: Phase) -> int:
        return sum(info.phase is phase for info, _ in self.drifted())

    def info(self, replica_id: str) -> ReplicaInfo:
        return self._members[replica_id].info

    def enter(self, replica_id: str, request_id: str, on_lost: Callable[[], None], *, pages: int = 0) -> None:
        """The request is now in the replica; `on_lost` is called once if the replica is lost meanwhile.

        Args:
            pages: that it will hold there; counted as used until it has `began`.
        """
        member = self._members[replica_id]
        member.on_lost[request_id] = on_lost
        member.promised[request_id] = pages

    def began(self, replica_id: str, request_id: str) -> None:
        """Its first token is there: its pages are in the replica's own count."""
        if member := self._members.get(replica_id):
            member.promised.pop(request_id, None)

    def leave(self, replica_id: str, request_id: str) -> None:
        if member := self._members.get(replica_id):
            member.on_lost.pop(request_id, None)
            member.promised.pop(request_id, None)

    def note(self, replica_id: str, fault: WorkerFault) -> None:
        """A call ended so. Where an engine seems to be dead nothing new goes until it speaks again."""
        member = self._members.get(replica_id)
        if fault.kind is FaultKind.ENGINE_DEAD and member is not None and not member.suspected:
            member.suspected = True
            log.warning("engine.suspected replica=%s", replica_id)

    @property
    def in_flight(self) -> int:
        """Places that requests hold in replicas: 0 when nothing runs."""
        return sum(len(member.on_lost) for member in self._members.values())

    def heard(self, frame: Frame) -> None:
        """A frame came: its engine lives."""
        if (member := self._by_engine.get(frame.engine_id)) is None:
            return
        member.heard_at = self._now()
        if frame.gauges is not None:
            member.gauges = frame.gauges
        if member.silent or member.suspected:
            member.silent = member.suspected = False
            log.info("engine.speaks_again engine=%s", frame.engine_id)

    async def watch(self, bus_address: str) -> None:
        """Attach to replicas that appear, drop those that go or fall silent. Runs until cancelled."""
        before = self._now()
        try:
            while True:
                self.refresh(bus_address)
                self._find_silent(late_s=self._now() - before - TICK_S)
                before = self._now()
                await self._sleep(TICK_S)
        finally:
            for task in self._attaching.values():
                task.cancel()

    def refresh(self, bus_address: str) -> None:
        """Compare the pool's lists with the members."""
        seen: set[str] = set()
        for phase in Phase:
            for replica_id in self._pool.replicas(phase):
                seen.add(replica_id)
                if (member := self._members.get(replica_id)) is not None:
                    member.leaving = False
                # A silent one may live, and have forgotten this gateway while it could not be reached.
                if (member is None or member.silent) and replica_id not in self._attaching:
                    task = asyncio.create_task(self._attach(phase, replica_id, bus_address))
                    self._attaching[replica_id] = task
        for replica_id in self._members.keys() - seen:
            member = self._members[replica_id]
            if not member.leaving:
                log.info("engine.leaving replica=%s requests=%d", replica_id, len(member.on_lost))
                member.leaving = True
            if not member.on_lost:
                del self._members[replica_id]
                self._by_engine.pop(member.info.engine_id, None)

    async def _attach(self, phase: Phase, replica_id: str, bus_address: str) -> None:
        again = replica_id in self._members
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ATTACH_TIMEOUT_S):
                    info = await self._pool.attach(phase, replica_id, self._gateway_id, bus_address)
                if isinstance(info, WorkerFault):
                    log.info("engine.attach.failed replica=%s fault=%s", replica_id, info.kind)
                    await self._sleep(REATTACH_S if again else TICK_S)
                    return
                if again:  # it counts as silent until a frame of it is here
                    self._judge_again(replica_id, info)
                    log.info("engine.attached_again replica=%s", replica_id)
                    await self._sleep(REATTACH_S)
                    return
                member = Member(info=info, heard_at=self._now(), drift=self._drift_of(info))
                self._members[replica_id] = self._by_engine[info.engine_id] = member
                log.info("engine.attached replica=%s phase=%s", replica_id, info.phase)
        finally:
            self._attaching.pop(replica_id, None)

    def _judge_again(self, replica_id: str, info: ReplicaInfo) -> None:
        if (member := self._members.get(replica_id)) is not None:
            member.info, member.drift = info, self._drift_of(info)
            self._by_engine[info.engine_id] = member

    def _drift_of(self, info: ReplicaInfo) -> str:
        """What differs; logged, since it needs a person."""
        replica = f"{info.phase} replica {info.replica_id}"
        drift = self._contract.disagreement(info.contract, ours="the gateway", theirs=replica)
        if drift:
            log.error("engine.drifted replica=%s phase=%s: %s", info.replica_id, info.phase, drift)
        return drift

    def _find_silent(self, *, late_s: float) -> None:
        if late_s > 1.0:
            # This process was held up itself: frames wait in the socket, and nobody is to be called dead.
            for member in self._members.values():
                member.heard_at = max(member.heard_at, self._now() - self._silence_s / 2)
            return
        for replica_id, member in self._members.items():
            if not member.silent and self._now() - member.heard_at > self._silence_s:
                member.silent = True
                why = LostReplica.REMOVED if member.leaving else LostReplica.SILENT
                self._lose(replica_id, member, why)

    def _lose(self, replica_id: str, member: Member, why: LostReplica) -> None:
        self._count_lost(why)
        log.warning("engine.lost replica=%s why=%s requests=%d", replica_id, why, len(member.on_lost))
        lost, member.on_lost = member.on_lost, {}
        member.promised.clear()
        for tell in lost.values():
            tell()
