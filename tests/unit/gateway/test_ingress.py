"""A whole gateway as its replica holds it: what its health check notices."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.config import GatewayConfig, ModelFacts
from gateway.ingress import Gateway
from gateway.telemetry import Telemetry
from gateway.tenants.store import TenantStore
from tests.support.engine_pool import FakePool
from tests.support.members import MEMBERSHIP
from tests.support.renderer import ByteRenderer


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    facts = ModelFacts(id="m", model_dir="", context_length=200, block_size=16)
    pool = FakePool()
    made = Gateway(
        GatewayConfig(model=facts),
        pool=pool,
        renderer=ByteRenderer(),
        store=TenantStore.open("redis://127.0.0.1:1/0", b"p" * 16),
        telemetry=Telemetry(),
        membership=MEMBERSHIP,
    )
    await made.start()
    yield made
    await made.close()
    pool.close()


@pytest.mark.parametrize("name", ["fleet-watch", "token-bus"])
async def test_a_gateway_that_lost_one_of_its_loops_is_not_healthy(gateway: Gateway, name: str) -> None:
    """It would stay up, and answer nobody: Serve replaces who fails its health check."""
    gateway.check()
    (loop,) = [task for task in asyncio.all_tasks() if task.get_name() == name]
    loop.cancel()
    await asyncio.wait([loop])

    with pytest.raises(RuntimeError, match="has ended"):
        gateway.check()
