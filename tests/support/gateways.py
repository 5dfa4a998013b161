"""A whole gateway in this process: real HTTP surface, real bus, scripted engines, keys in a dictionary."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from starlette.applications import Starlette

from gateway.app import create_app
from gateway.config import GatewayConfig, ModelFacts
from gateway.dispatch import driver
from gateway.dispatch.bus_receiver import BusReceiver
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.placement import Placement
from gateway.dispatch.summary import Summaries
from gateway.drain import Drain
from gateway.errors import StateUnavailable
from gateway.services import Capacity, ServedModel, Services
from gateway.telemetry import Telemetry
from gateway.tenants.model import Account, KeyRecord, Tenant
from kv_transfer.api import Contract
from tests.support.engine_pool import CONTRACT, FakePool, Script
from tests.support.members import MEMBERSHIP
from tests.support.renderer import ByteRenderer
from workers.api import Phase

MODEL, OTHER_MODEL = "@cf/example/small", "@cf/example/other"
ACCOUNT = "a" * 32
KEY, LIMITED_KEY = "pg_" + "k" * 43, "pg_" + "l" * 43
RUN = f"/client/v4/accounts/{ACCOUNT}/ai/run/{MODEL}"
CHAT = "/v1/chat/completions"
AUTH = {"authorization": f"Bearer {KEY}"}
ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_ASK = ASK | {"model": MODEL}


class FixedKeys:
    """`KEY` may use everything, `LIMITED_KEY` only `OTHER_MODEL`."""

    def __init__(self) -> None:
        account = Account(id=ACCOUNT, name="tests", cache_salt="salt")
        free = KeyRecord(id="key_free", account_id=ACCOUNT, created_at=0)
        limited = replace(free, id="key_limited", models=(OTHER_MODEL,))
        self._tenants = {
            KEY: Tenant(account=account, key=free),
            LIMITED_KEY: Tenant(account=account, key=limited),
        }
        self.reachable = True

    async def resolve(self, key: str) -> Tenant | None:
        if not self.reachable:
            raise StateUnavailable(retry_after_s=1)
        return self._tenants.get(key)


def events(answer: httpx.Response) -> list[Any]:
    """The stream's events; `[DONE]` as a string."""
    lines = [block.removeprefix("data: ") for block in answer.text.split("\n\n") if block]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@dataclass
class TestGateway:
    __test__ = False

    app: Starlette
    pool: FakePool
    keys: FixedKeys
    bus: BusReceiver
    fleet: Fleet
    summaries: Summaries
    capacity: Capacity
    drain: Drain
    client: httpx.AsyncClient


class ManualClock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


@asynccontextmanager
async def running_gateway(
    script: Script | None = None,
    *,
    attach: bool = True,
    max_in_flight: int = 8,
    request_timeout_s: float = 10.0,
    max_body_bytes: int = 100_000,
    body_timeout_s: float = 10.0,
    context_length: int = 200,
    proxy_labels: bool = False,
    telemetry: Telemetry | None = None,
    patience_s: float = 5.0,
    contract: Contract = CONTRACT,
    contracts: Mapping[str, Contract] | None = None,
) -> AsyncIterator[TestGateway]:
    """Afterwards nothing may be left over: no call, no subscription, no slot."""
    telemetry = telemetry if telemetry is not None else Telemetry()
    pool, clock, drain = FakePool(script), ManualClock(), Drain()
    pool.contracts.update(contracts or {})
    fleet = Fleet(pool, gateway_id="g1", contract=contract, silence_s=10.0, now=clock.now, sleep=_never)
    telemetry.metrics.watch_drift(fleet.count_drifted)
    bus = BusReceiver("127.0.0.1", fleet.heard, MEMBERSHIP)
    bus.start()
    engines = driver.Services(
        pool=pool,
        fleet=fleet,
        placement=Placement(fleet, telemetry.metrics),
        bus=bus,
        gateway_id="g1",
        block_size=16,
        request_timeout_s=request_timeout_s,
        summaries=Summaries(),
        metrics=telemetry.metrics,
        settle_s=0.2,
        patience_s=patience_s,
        drain=drain,
    )
    facts = ModelFacts(
        id=MODEL, aliases=("small",), model_dir="", context_length=context_length, block_size=16
    )
    models = tuple(
        ServedModel(
            facts=each,
            renderer=ByteRenderer(context_length),
            engines=engines,
            system_fingerprint=contract.short,
        )
        for each in (facts, replace(facts, id=OTHER_MODEL, aliases=()))
    )
    keys, capacity = FixedKeys(), Capacity(max_in_flight)
    config = GatewayConfig(
        model=facts,
        max_body_bytes=max_body_bytes,
        body_timeout_s=body_timeout_s,
        proxy_labels=proxy_labels,
    )
    app = create_app(
        Services(
            config=config,
            keys=keys,
            models=models,
            capacity=capacity,
            wall_clock=lambda: 1.7e9,
            telemetry=telemetry,
            drain=drain,
        )
    )
    if attach:
        fleet.refresh(bus.address)
        for _ in range(5):  # the attach tasks need a few passes of the loop
            await asyncio.sleep(0)
        assert len(fleet.engines()) == len(Phase)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            yield TestGateway(app, pool, keys, bus, fleet, engines.summaries, capacity, drain, client)
    finally:
        await bus.close()
        pool.close()
    assert (capacity.in_flight, bus.subscribed, fleet.in_flight) == (0, 0, 0), "something was left over"
    assert not any(pool.running.values()), f"calls left running: {pool.running}"
    assert set(pool.present) == set(Phase)


async def _never(_: float) -> None:
    await asyncio.Event().wait()
