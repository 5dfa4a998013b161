"""An engine pool without engines: answers from a script, and speaks real frames to the bus."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from kv_transfer.api import NOTHING_CHECKED, Contract, Coverage, HandoffOutcome, HandoffReport
from tests.support.members import MEMBERSHIP
from tests.support.renderer import END, tokens_of
from workers.api import (
    BUS_VERSION,
    DecodeRequest,
    DecodeResult,
    FaultKind,
    FinishReason,
    Frame,
    Gauges,
    IntegrityCounts,
    Item,
    Phase,
    PrefillRequest,
    PrefillResult,
    RefetchResult,
    ReplicaInfo,
    ReplicaStatus,
    WorkerFault,
)
from workers.api.bus import encode

CONTRACT = Contract(source={"revision": "one"})
"""Of every replica, unless `contracts` says otherwise."""
HANDOFF = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=2, wire_bytes=64, seconds=0.1)


@dataclass
class Script:
    """What the decode engine does with every request."""

    answer: str = "Hello, world."
    stops: bool = True
    """The answer ends with the end token, if `max_tokens` allows."""
    chunk: int = 3
    """Tokens a frame."""
    lose: set[int] = field(default_factory=set)
    """Frames of an answer, by number, that never arrive."""
    forget: bool = False
    """Refetches find nothing."""
    pace_s: float = 0.0
    """Between two frames."""
    hold_at: int | None = None
    """After so many frames the engine makes no more until `release` is set."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    fault: FaultKind | None = None
    """Decode's answer: at once, or on release if it holds."""
    prefill_fault: FaultKind | None = None
    prefill_hangs: bool = False
    tells_first: bool = False
    """The first item says how the pages came."""
    wait_for_prefill: bool = False
    """Decode with a transfer makes nothing: its pages never come."""
    aside_hangs: bool = False
    """Refetches and releases are never answered."""
    peer_unknown: bool = False
    """Decode with a transfer does not find the prefill engine."""


class FakePool:
    """One prefill and one decode replica."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.present = {Phase.PREFILL: ("p1",), Phase.DECODE: ("d1",)}
        self.started = {"p1": 1000, "d1": 2000}
        self.devices: dict[str, str] = {}
        self.coverage: dict[str, Coverage] = {}
        self.contracts: dict[str, Contract] = {}
        self.prefills: list[PrefillRequest] = []
        self.decodes: list[DecodeRequest] = []
        self.cancelled: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        self.refetched_from: list[int] = []
        self.released: list[str] = []
        self.decoding = asyncio.Event()
        """A decode call has come."""
        self._made: dict[str, tuple[int, ...]] = {}
        self._context = zmq.asyncio.Context()
        self._sockets: dict[str, zmq.asyncio.Socket] = {}

    def close(self) -> None:
        self._context.destroy(linger=0)

    def replicas(self, phase: Phase) -> tuple[str, ...]:
        return self.present[phase]

    async def attach(
        self, phase: Phase, replica_id: str, gateway_id: str, bus_address: str
    ) -> ReplicaInfo | WorkerFault:
        if bus_address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            MEMBERSHIP.client(socket)
            socket.connect(bus_address)
            self._sockets[bus_address] = socket
        return ReplicaInfo(
            replica_id=replica_id,
            engine_id=f"engine-{replica_id}",
            phase=phase,
            format="bf16",
            pid=1,
            block_size=16,
            page_bytes=1,
            total_pages=100,
            device=self.devices.get(replica_id, "cpu"),
            started_at=self.started.get(replica_id, 1000),
            coverage=self.coverage.get(replica_id, NOTHING_CHECKED),
            contract=self.contracts.get(replica_id, CONTRACT),
        )

    async def status(self, phase: Phase, replica_id: str) -> ReplicaStatus | WorkerFault:
        return WorkerFault(kind=FaultKind.INTERNAL, detail="not scripted")

    async def prefill(self, replica_id: str, request: PrefillRequest) -> PrefillResult | WorkerFault:
        self.prefills.append(request)
        with self._counted("prefill"):
            if self.script.prefill_fault:
                return WorkerFault(kind=self.script.prefill_fault)
            if self.script.prefill_hangs:
                await asyncio.Event().wait()
            return PrefillResult(cached_tokens=16, seconds=0.0)

    async def decode(self, replica_id: str, request: DecodeRequest) -> DecodeResult | WorkerFault:
        self.decodes.append(request)
        self.decoding.set()
        with self._counted("decode"):
            if self.script.wait_for_prefill and request.transfer_id:
                await asyncio.Event().wait()
            if self.script.peer_unknown and request.transfer_id:
                return WorkerFault(kind=FaultKind.PEER_UNKNOWN)
            return await self._answer(request)

    async def refetch(self, replica_id: str, request_id: str, from_index: int) -> RefetchResult | WorkerFault:
        self.refetched_from.append(from_index)
        if self.script.aside_hangs:
            await asyncio.Event().wait()
        if self.script.forget:
            return WorkerFault(kind=FaultKind.INTERNAL)
        return RefetchResult(first_index=from_index, token_ids=self._made[request_id][from_index:])

    async def release(self, replica_id: str, transfer_id: str) -> WorkerFault | None:
        self.released.append(transfer_id)
        if self.script.aside_hangs:
            await asyncio.Event().wait()
        return None

    async def heartbeat(
        self, replica_id: str, free_pages: int = 100, *, integrity: IntegrityCounts | None = None
    ) -> None:
        gauges = Gauges(free_pages=free_pages, running=0, waiting=0, integrity=integrity or IntegrityCounts())
        frame = Frame(version=BUS_VERSION, engine_id=f"engine-{replica_id}", items=(), gauges=gauges)
        for socket in self._sockets.values():
            await socket.send(encode(frame))

    async def send_raw(self, data: bytes) -> None:
        for socket in self._sockets.values():
            await socket.send(data)

    async def _answer(self, request: DecodeRequest) -> DecodeResult | WorkerFault:
        script, limit = self.script, request.sampling.max_tokens
        tokens = tokens_of(script.answer) + ((END,) if script.stops else ())
        finish = FinishReason.STOP if script.stops and len(tokens) <= limit else FinishReason.LENGTH
        tokens = tokens[:limit]
        if script.fault and script.hold_at is None:
            return WorkerFault(kind=script.fault)
        for number, at in enumerate(range(0, len(tokens), script.chunk)):
            if number == script.hold_at:
                await script.release.wait()
                if script.fault:
                    return WorkerFault(kind=script.fault)
            if script.pace_s:
                await asyncio.sleep(script.pace_s)
            part = tokens[at : at + script.chunk]
            self._made[request.request_id] = tokens[: at + len(part)]
            if number not in script.lose:
                last = finish if at + len(part) == len(tokens) else None
                await self._send(request, at, part, last)
        return DecodeResult(
            output_tokens=len(tokens),
            finish_reason=finish,
            cached_tokens=7,
            handoff=HANDOFF if request.transfer_id else None,
            seconds=0.1,
        )

    async def _send(
        self, request: DecodeRequest, at: int, part: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        item = Item(
            request_id=request.request_id,
            attempt=request.attempt,
            first_index=at,
            token_ids=part,
            finish=finish,
            handoff=HANDOFF if self.script.tells_first and at == 0 else None,
        )
        frame = Frame(version=BUS_VERSION, engine_id="engine-d1", items=(item,))
        await self._sockets[request.bus_address].send(encode(frame))

    def _counted(self, what: str) -> "_Counted":
        return _Counted(self, what)


class _Counted:
    """Counts a call while it runs, and whether it was cancelled."""

    def __init__(self, pool: FakePool, what: str) -> None:
        self._pool, self._what = pool, what

    def __enter__(self) -> None:
        self._pool.running[self._what] += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.running[self._what] -= 1
        if kind is asyncio.CancelledError:
            self._pool.cancelled[self._what] += 1
