"""Pinned calls on a real Serve cluster: the named replica, a dead one, a missing one, a cancelled one.

The gateway's side runs in a Serve replica, as it does in production: that is where its router lives.
"""

import asyncio
import contextvars
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from workers.api import FaultKind, Phase

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.asyncio(loop_scope="module")]

OPTIMISED = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0"}

MAX_ONGOING = 20


class Engine:
    """Takes the calls of a replica; `request_id` says what to do."""

    def __init__(self) -> None:
        self._cancelled = self._hanging = 0

    async def prefill(self, request: str, *, to: str | None = None) -> Any:
        return await self.decode(request, to=to)

    async def decode(self, request: str, *, to: str | None = None) -> Any:
        from ray import serve

        if request == "raise":
            raise ValueError("secret detail")
        if request == "hang":
            self._hanging += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self._cancelled += 1
                raise
            finally:
                self._hanging -= 1
        return serve.get_replica_context().replica_id.unique_id

    async def attach(self, gateway_id: str, bus_address: str, *, to: str | None = None) -> Any:
        return os.getpid()

    async def status(self, *, to: str | None = None) -> Any:
        return self._cancelled

    async def refetch(self, request_id: str, from_index: int, *, to: str | None = None) -> Any:
        return self._hanging


class Caller:
    """The gateway's side: a `ServePool` in a Serve replica."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        from gateway.dispatch.pools import ServePool

        self._pool = ServePool(prefill, decode)

    async def replicas(self) -> tuple[str, ...]:
        return self._pool.replicas(Phase.DECODE)

    async def call(self, method: str, *args: Any) -> Any:
        async with asyncio.timeout(20):
            return await getattr(self._pool, method)(*args)

    async def call_when_full(self, replica_id: str) -> Any:
        """A further call to a replica that has as many as it takes."""
        filling: list[asyncio.Task[Any]] = []
        try:
            for taken in range(1, MAX_ONGOING + 1):
                filling.append(self._alone(self._pool.decode, replica_id, "hang"))
                # The last place is for this question itself: it is asked until the place is taken.
                while taken < MAX_ONGOING and await self._hanging(replica_id) < taken:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(20):
                while True:
                    answer = await self._alone(self._pool.decode, replica_id, "id")
                    if not isinstance(answer, str):
                        return answer
                    await asyncio.sleep(0.2)
        finally:
            for task in filling:
                task.cancel()
            await asyncio.wait(filling, timeout=5)

    async def _hanging(self, replica_id: str) -> Any:
        return await self._alone(self._pool.refetch, replica_id, "hanging", 0)

    def _alone(self, method: Any, *args: Any) -> asyncio.Task[Any]:
        """As if a request of its own made the call: those of one request share an id in Serve's router."""
        return asyncio.create_task(method(*args), context=contextvars.Context())

    async def call_and_cancel(self, replica_id: str) -> None:
        request: Any = "hang"
        task = asyncio.create_task(self._pool.decode(replica_id, request))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task], timeout=5)


class Stopping:
    """A replica whose one request goes on until the replica is told to stop."""

    async def __init__(self) -> None:  # type: ignore[misc]
        from deploy.serve_shutdown import when_told_to_stop

        self._told = asyncio.Event()
        self._inside = 0
        when_told_to_stop(self._begin)

    async def _begin(self) -> None:
        self._told.set()

    async def inside(self) -> int:
        while not self._inside:  # noqa: ASYNC110 - the request is on its way
            await asyncio.sleep(0.01)
        return self._inside

    async def hang(self) -> str:
        self._inside += 1
        await self._told.wait()
        return "told"


def deploy_stopping() -> Any:
    from ray import serve

    deployment = serve.deployment(
        name="Stopping",
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": OPTIMISED}},
        graceful_shutdown_timeout_s=10,
        max_ongoing_requests=5,
    )(Stopping)
    return serve.run(deployment.bind(), name="stopping", route_prefix=None)


def deploy() -> None:
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0.1, "runtime_env": {"env_vars": OPTIMISED}},
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_timeout_s": 1,
    }
    router = RequestRouterConfig(request_router_class="gateway.routing.pinned:PinnedRouter")
    pools = [
        serve.deployment(name=name, num_replicas=count, request_router_config=router, **options)(
            Engine
        ).bind()
        for name, count in (("Prefill", 1), ("Decode", 3))
    ]
    serve.start(proxy_location="Disabled")
    gateway = serve.deployment(name="Gateway", **options)(Caller)
    serve.run(gateway.bind(*pools), name="pool", route_prefix=None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller() -> AsyncIterator[Any]:
    os.environ.update(OPTIMISED)  # read where handles are built: here, and in the replicas
    import ray
    from ray import serve

    scratch = tempfile.mkdtemp(prefix="pgs", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 1024**2,
        _temp_dir=scratch,
    )
    try:
        await asyncio.to_thread(deploy)
        handle = serve.get_app_handle("pool")
        yield handle
        await handle.shutdown_async()
    finally:
        await asyncio.to_thread(serve.shutdown)
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)


async def ask(caller: Any, method: str, *args: Any) -> Any:
    async with asyncio.timeout(30):
        return await getattr(caller, method).remote(*args)


async def replicas(caller: Any, count: int = 3) -> tuple[str, ...]:
    """The list reaches the router by Serve's own long poll: wait for it, within a bound."""
    for _ in range(200):
        if len(found := await ask(caller, "replicas")) >= count:
            return tuple(found)
        await asyncio.sleep(0.05)
    raise AssertionError("the replica list never came")


async def test_every_call_reaches_the_replica_it_names_without_a_call_before(caller: Any) -> None:
    for replica_id in await replicas(caller):
        assert [await ask(caller, "call", "decode", replica_id, "id") for _ in range(4)] == [replica_id] * 4


async def test_missing_replica_is_a_dead_engine_at_once(caller: Any) -> None:
    await replicas(caller)

    fault = await ask(caller, "call", "decode", "nobody", "id")

    assert fault.kind is FaultKind.ENGINE_DEAD


async def test_exception_in_a_replica_is_a_fault_without_its_text(caller: Any) -> None:
    fault = await ask(caller, "call", "decode", (await replicas(caller))[0], "raise")

    assert (fault.kind, fault.detail) == (FaultKind.INTERNAL, "decode: ValueError")


async def test_cancelled_call_is_cancelled_in_the_replica(caller: Any) -> None:
    replica_id = (await replicas(caller))[0]

    await ask(caller, "call_and_cancel", replica_id)

    assert await ask(caller, "call", "status", Phase.DECODE, replica_id) == 1


@pytest.mark.long
async def test_a_call_to_a_full_replica_is_busy_after_a_while_and_the_replica_works_on(caller: Any) -> None:
    replica_id = (await replicas(caller))[1]

    fault = await ask(caller, "call_when_full", replica_id)

    assert fault.kind is FaultKind.BUSY
    assert await ask(caller, "call", "decode", replica_id, "id") == replica_id


async def test_a_replica_hears_of_its_end_while_requests_are_in_it(caller: Any) -> None:
    """Serve lets them go on for its grace; our own word to them comes before it kills."""
    from ray import serve

    stopping = await asyncio.to_thread(deploy_stopping)
    hanging = stopping.hang.remote()
    assert await stopping.inside.remote() == 1

    await asyncio.to_thread(serve.delete, "stopping", False)

    assert await hanging == "told"


async def test_killed_replica_is_a_dead_engine(caller: Any) -> None:
    """Last in the file: it costs the cluster a replica."""
    victim = (await replicas(caller))[-1]
    pid = await ask(caller, "call", "attach", Phase.DECODE, victim, "g", "b")
    hanging = caller.call.remote("decode", victim, "hang")
    assert await ask(caller, "call", "decode", victim, "id") == victim

    os.kill(pid, signal.SIGKILL)

    assert (await hanging).kind is FaultKind.ENGINE_DEAD
