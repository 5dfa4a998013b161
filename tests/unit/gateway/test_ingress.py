"""A whole gateway as its replica holds it: what its health check notices, and what its status tells."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.config import GatewayConfig, ModelFacts
from gateway.ingress import Gateway
from gateway.telemetry import Telemetry
from gateway.tenants.store import TenantStore
from kv_transfer.api import Contract
from tests.support.engine_pool import CONTRACT, FakePool
from tests.support.members import MEMBERSHIP
from tests.support.renderer import ByteRenderer


@asynccontextmanager
async def running(pool: FakePool) -> AsyncIterator[Gateway]:
    facts = ModelFacts(id="m", model_dir="", context_length=200, block_size=16)
    made = Gateway(
        GatewayConfig(model=facts),
        pool=pool,
        renderer=ByteRenderer(),
        store=TenantStore.open("redis://127.0.0.1:1/0", b"p" * 16),
        telemetry=Telemetry(),
        membership=MEMBERSHIP,
        contract=CONTRACT,
    )
    await made.start()
    try:
        yield made
    finally:
        await made.close()
        pool.close()


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with running(FakePool()) as made:
        yield made


@pytest.mark.parametrize("name", ["fleet-watch", "token-bus"])
async def test_a_gateway_that_lost_one_of_its_loops_is_not_healthy(gateway: Gateway, name: str) -> None:
    """It would stay up, and answer nobody: Serve replaces who fails its health check."""
    gateway.check()
    (loop,) = [task for task in asyncio.all_tasks() if task.get_name() == name]
    loop.cancel()
    await asyncio.wait([loop])

    with pytest.raises(RuntimeError, match="has ended"):
        gateway.check()


async def test_its_status_tells_its_contract_and_who_has_drifted_from_it() -> None:
    """And its metrics count them: both read the fleet that the requests are routed by."""
    pool = FakePool()
    pool.contracts["d1"] = other = Contract(source={"revision": "another"})
    async with running(pool) as made:
        async with asyncio.timeout(5):
            while not made.status()["drifted"]:  # noqa: ASYNC110 - the fleet is asked, it does not call
                await asyncio.sleep(0.01)
        status, (_, page) = made.status(), made.metrics()

    assert status["contract"] == CONTRACT.short
    assert status["drifted"] == [
        {
            "id": "d1",
            "phase": "decode",
            "contract": other.short,
            "why": "the gateway and decode replica d1 differ in source: revision one against another",
        }
    ]
    assert b'phasegate_drifted_replicas{phase="decode"} 1.0' in page
