"""One gateway replica: everything it needs, built inside it. Wrapped as a Serve deployment elsewhere."""

import asyncio
import contextlib
import os
import secrets
import time
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.app import create_app
from gateway.config import GatewayConfig, GatewaySecrets
from gateway.dispatch import driver
from gateway.dispatch.bus_receiver import BusReceiver
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.placement import Placement
from gateway.dispatch.pools import EnginePool, ServePool
from gateway.dispatch.summary import Summaries
from gateway.drain import Drain, take_leave
from gateway.prompt.render import Renderer, VllmRenderer
from gateway.services import Capacity, ServedModel, Services
from gateway.telemetry import Telemetry
from gateway.tenants.store import TenantStore, wall_clock
from kv_transfer.api import Contract, Membership
from kv_transfer.testing.holds import holds_in


class Gateway:
    """A gateway over any pool, renderer and store. `start` before the first request, `close` at the end."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        pool: EnginePool,
        renderer: Renderer,
        store: TenantStore,
        telemetry: Telemetry,
        membership: Membership,
        contract: Contract,
    ) -> None:
        """`contract`: of the model folder that `renderer` reads. Engines of another one get no requests."""
        self.id = secrets.token_hex(16)
        self._store = store
        self._summaries = Summaries()
        self._metrics = telemetry.metrics
        self._fleet = Fleet(
            pool,
            gateway_id=self.id,
            contract=contract,
            silence_s=config.silence_s,
            now=time.monotonic,
            count_lost=self._metrics.lost,
        )
        self._bus = BusReceiver(config.host, self._fleet.heard, membership)
        self._metrics.watch_bus(self._bus)
        self._metrics.watch_drift(self._fleet.count_drifted)
        self._fingerprint = contract.short
        self._capacity = Capacity(config.max_in_flight)
        self._drain = Drain()
        self._watch: asyncio.Task[None] | None = None
        engines = driver.Services(
            pool=pool,
            fleet=self._fleet,
            placement=Placement(self._fleet, self._metrics, config.marks),
            bus=self._bus,
            gateway_id=self.id,
            block_size=config.model.block_size,
            request_timeout_s=config.request_timeout_s,
            summaries=self._summaries,
            metrics=self._metrics,
            drain=self._drain,
        )
        self.app = create_app(
            Services(
                config=config,
                keys=store,
                models=(
                    ServedModel(
                        facts=config.model,
                        renderer=renderer,
                        engines=engines,
                        system_fingerprint=self._fingerprint,
                    ),
                ),
                capacity=self._capacity,
                wall_clock=wall_clock,
                drain=self._drain,
                holds=holds_in(config.holds),
                telemetry=telemetry,
            )
        )

    async def start(self) -> None:
        """Bind the bus and begin to attach replicas. Needs the event loop that will serve requests."""
        self._bus.start()
        self._watch = asyncio.create_task(self._fleet.watch(self._bus.address), name="fleet-watch")

    async def drain(self, grace_s: float, *, refuse_new: bool) -> dict[str, int]:
        """See `drain.take_leave`."""
        return await take_leave(self._drain, self._capacity, grace_s, refuse_new=refuse_new)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await self._bus.close()
        await self._store.close()

    def check(self) -> None:
        """Raises when a background task has died: without it no request can be answered."""
        if self._watch is not None and self._watch.done():
            raise RuntimeError("the replica watch has ended")
        if self._bus.ended:
            raise RuntimeError("the token bus has ended")

    def status(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "pid": os.getpid(),
            "in_flight": self._capacity.in_flight,
            "places": self._fleet.in_flight,
            "subscriptions": self._bus.subscribed,
            "contract": self._fingerprint,
            "drifted": [
                {
                    "id": info.replica_id,
                    "phase": info.phase.value,
                    "contract": info.contract.short,
                    "why": why,
                }
                for info, why in self._fleet.drifted()
            ],
        }

    def metrics(self) -> tuple[str, bytes]:
        return self.id, self._metrics.page(self._capacity.in_flight)

    def request_summary(self, request_id: str) -> dict[str, Any] | None:
        return self._summaries.get(request_id)


class GatewayReplica:
    """The gateway inside a Serve replica. `prefill` and `decode` are deployment handles, decode's one
    for each of its pools."""

    def __init__(
        self,
        config: GatewayConfig,
        secrets: GatewaySecrets,
        prefill: Any,
        *decode: Any,
        membership: Membership,
        contract: Contract,
        telemetry: Telemetry,
    ) -> None:
        """Takes seconds: imports vLLM for its renderer."""
        self._gateway = Gateway(
            config,
            pool=ServePool(prefill, *decode),
            renderer=VllmRenderer(config.model.model_dir, config.model.context_length),
            store=TenantStore.open(secrets.state_url, secrets.pepper),
            telemetry=telemetry,
            membership=membership,
            contract=contract,
        )
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Idempotent. Called by the first of: a request, a health check, a status call."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._gateway.start())
        await asyncio.shield(self._starting)

    async def asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application of this replica."""
        if scope["type"] == "http":
            await self.start()
            await self._gateway.app(scope, receive, send)

    async def check_health(self) -> None:
        await self.start()
        self._gateway.check()

    async def status(self) -> dict[str, Any]:
        """Gauges: requests in flight, the places they hold in replicas, who listens on the bus."""
        await self.start()
        return self._gateway.status()

    async def metrics(self) -> tuple[str, bytes]:
        """(this gateway's id, its metrics in Prometheus' text form)."""
        return self._gateway.metrics()

    async def request_summary(self, request_id: str) -> dict[str, Any] | None:
        """Figures of one of the last 1,024 finished requests: see `RequestSummary`. No text."""
        return self._gateway.request_summary(request_id)

    async def drain(self, grace_s: float, refuse_new: bool = True) -> dict[str, int]:
        """See `Gateway.drain`."""
        return await self._gateway.drain(grace_s, refuse_new=refuse_new)

    async def close(self) -> None:
        await self._gateway.close()
