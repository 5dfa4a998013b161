"""Replicas whose engine, bus and registry are in the test's hand."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.api import Contract
from tests.support.engines import ScriptedEngine
from workers.api import DecodeRequest, Frame, Item, PrefillRequest, Sampling
from workers.api.bus import decode
from workers.pools.config import ReplicaConfig
from workers.pools.decode import DecodeReplica
from workers.pools.prefill import PrefillReplica
from workers.pools.replica import Parts
from workers.telemetry import Telemetry

PROFILE: dict[str, Any] = {
    "name": "tiny",
    "model_id": "@cf/tiny/tiny",
    "weights": {"path": "/models/tiny"},
    "context_length": 512,
    "block_size": 16,
    "prefill": {"max_sequences": 1},
    "decode": {"max_sequences": 1},
}


class MemoryRegistry:
    """A peer registry for replicas that share a process."""

    def __init__(self, **engines: tuple[str, ...]) -> None:
        self.engines = dict(engines)

    async def publish(self, engine_id: str, addresses: tuple[str, ...]) -> None:
        self.engines[engine_id] = addresses

    async def lookup(self, engine_id: str) -> tuple[str, ...] | None:
        return self.engines.get(engine_id)

    async def withdraw(self, engine_id: str) -> None:
        self.engines.pop(engine_id, None)


@dataclass
class RecordedSink:
    """Keeps what was sent, as long as it has room."""

    address: str = "tcp://gateway"
    room: int = 1_000_000
    here: bool = True
    closed: bool = False
    frames: list[Frame] = field(default_factory=list)

    def send(self, frame: bytes) -> bool:
        if len(self.frames) >= self.room:
            return False
        self.frames.append(decode(frame))
        return True

    def connected(self) -> bool:
        return self.here

    def close(self) -> None:
        self.closed = True

    @property
    def with_items(self) -> list[Frame]:
        return [frame for frame in self.frames if frame.items]

    @property
    def items(self) -> list[Item]:
        return [item for frame in self.frames for item in frame.items]

    def tokens_of(self, request_id: str) -> list[int]:
        return [t for item in self.items if item.request_id == request_id for t in item.token_ids]


class SinkBoard:
    """A factory of sinks that remembers them by address."""

    def __init__(self, **prepared: RecordedSink) -> None:
        self.sinks: dict[str, RecordedSink] = dict(prepared)

    def open(self, address: str) -> RecordedSink:
        return self.sinks.setdefault(address, RecordedSink(address))

    def __getitem__(self, address: str) -> RecordedSink:
        return self.sinks[address]


@dataclass
class HandClock:
    """Seconds that pass when the test says so. A sleeper waits for the next `tick`."""

    seconds: float = 100.0
    sleeper: asyncio.Future[None] | None = None

    def now(self) -> float:
        return self.seconds

    async def sleep(self, _: float) -> None:
        self.sleeper = asyncio.get_running_loop().create_future()
        await self.sleeper

    async def tick(self, seconds: float) -> None:
        """Let `seconds` pass, wake the sleeper, and return when it sleeps again."""
        self.seconds += seconds
        sleeper = self.sleeper
        if sleeper is not None:
            sleeper.set_result(None)
        await settle()


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@dataclass
class Bench:
    """The surroundings of one replica."""

    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    registry: MemoryRegistry = field(default_factory=lambda: MemoryRegistry(p1=("tcp://127.0.0.1:7001",)))
    board: SinkBoard = field(default_factory=SinkBoard)
    clock: HandClock = field(default_factory=HandClock)
    config: ReplicaConfig = field(
        default_factory=lambda: ReplicaConfig(profile=PROFILE, model_dir="/models/tiny")
    )
    telemetry: Telemetry = field(default_factory=Telemetry)
    contract: Contract = field(default_factory=Contract)
    folder: Contract | None = None
    """What the folder says when the engine has loaded it; None: the same."""

    def parts(self, engine_id: str) -> Parts:
        return Parts(
            engine=self.engine,
            engine_id=engine_id,
            replica_id=f"replica-{engine_id}",
            contract=self.contract,
            read_contract=lambda: self.folder if self.folder is not None else self.contract,
            registry=self.registry,
            open_sink=self.board.open,
            now=self.clock.now,
            wall_ns=lambda: 1_700_000_000_999_999_999,
            sleep=self.clock.sleep,
            telemetry=self.telemetry,
        )

    async def decode_replica(self) -> DecodeReplica:
        replica = DecodeReplica(self.config, self.parts("d1"))
        await replica.start()
        await settle()
        return replica

    async def prefill_replica(self) -> PrefillReplica:
        replica = PrefillReplica(self.config, self.parts("p9"))
        await replica.start()
        await settle()
        return replica


def a_decode(request_id: str = "r1", **changes: Any) -> DecodeRequest:
    usual: dict[str, Any] = {
        "request_id": request_id,
        "attempt": 0,
        "token_ids": (5, 6, 7),
        "cache_salt": "salt",
        "sampling": Sampling(max_tokens=8),
        "stop_token_ids": (2,),
        "gateway_id": "g1",
        "bus_address": "tcp://g1",
        "deadline_s": 30.0,
    }
    return DecodeRequest(**(usual | changes))


def a_prefill(request_id: str = "r1", **changes: Any) -> PrefillRequest:
    usual: dict[str, Any] = {
        "request_id": request_id,
        "transfer_id": "ab" * 16,
        "decode_engine": "d1",
        "token_ids": (5, 6, 7),
        "cache_salt": "salt",
        "deadline_s": 30.0,
    }
    return PrefillRequest(**(usual | changes))
