"""How the gateway reaches engines: a protocol, and its form over Ray Serve handles."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, Final, Protocol, TypeVar

from gateway.routing import replica_table
from kv_transfer.api import LedgerSnapshot
from workers.api import (
    DecodeRequest,
    DecodeResult,
    FaultKind,
    Phase,
    PrefillRequest,
    PrefillResult,
    RefetchResult,
    ReplicaInfo,
    ReplicaStatus,
    WorkerFault,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_OWN: Final = {Phase.PREFILL: "release", Phase.DECODE: "refetch"}
"""The method that only this phase has."""


class EnginePool(Protocol):
    """Every call names its replica and ends in a value: a result, or the fault that took its place.

    Cancelling a call cancels it in the engine, at once.
    """

    def replicas(self, phase: Phase) -> tuple[str, ...]:
        """Ids of the replicas that exist now."""

    async def prefill(self, replica_id: str, request: PrefillRequest) -> PrefillResult | WorkerFault: ...

    async def decode(self, replica_id: str, request: DecodeRequest) -> DecodeResult | WorkerFault: ...

    async def refetch(
        self, replica_id: str, request_id: str, from_index: int
    ) -> RefetchResult | WorkerFault: ...

    async def release(self, replica_id: str, transfer_id: str) -> WorkerFault | None:
        """Prefill's pages of this transfer will not be fetched by anybody."""

    async def attach(
        self, phase: Phase, replica_id: str, gateway_id: str, bus_address: str
    ) -> ReplicaInfo | WorkerFault:
        """Afterwards the replica sends frames to `bus_address`, a heartbeat each second at least."""

    async def status(self, phase: Phase, replica_id: str) -> ReplicaStatus | WorkerFault: ...


class ServePool:
    """Serve deployments behind `PinnedRouter`: one of prefill, one or more of decode."""

    def __init__(self, prefill: Any, *decode: Any) -> None:
        """Takes `DeploymentHandle`s. Making the options starts the routers, and with them the replica lists:
        without it the lists would stay empty until a first call, which needs them."""
        self._pools = {Phase.PREFILL: (prefill,), Phase.DECODE: decode}
        self._methods = {
            (phase, number, method): handle.options(method_name=method)
            for phase, handles in self._pools.items()
            for number, handle in enumerate(handles)
            for method in (phase.value, _OWN[phase], "attach", "status", "metrics", "ledger")
        }

    def replicas(self, phase: Phase) -> tuple[str, ...]:
        return tuple(replica_id for handle in self._pools[phase] for replica_id in _replicas(handle))

    async def prefill(self, replica_id: str, request: PrefillRequest) -> PrefillResult | WorkerFault:
        answer: PrefillResult | WorkerFault = await self._call(Phase.PREFILL, "prefill", replica_id, request)
        return answer

    async def decode(self, replica_id: str, request: DecodeRequest) -> DecodeResult | WorkerFault:
        answer: DecodeResult | WorkerFault = await self._call(Phase.DECODE, "decode", replica_id, request)
        return answer

    async def refetch(self, replica_id: str, request_id: str, from_index: int) -> RefetchResult | WorkerFault:
        answer: RefetchResult | WorkerFault = await self._call(
            Phase.DECODE, "refetch", replica_id, request_id, from_index
        )
        return answer

    async def release(self, replica_id: str, transfer_id: str) -> WorkerFault | None:
        answer: WorkerFault | None = await self._call(Phase.PREFILL, "release", replica_id, transfer_id)
        return answer

    async def attach(
        self, phase: Phase, replica_id: str, gateway_id: str, bus_address: str
    ) -> ReplicaInfo | WorkerFault:
        answer: ReplicaInfo | WorkerFault = await self._call(
            phase, "attach", replica_id, gateway_id, bus_address
        )
        return answer

    async def status(self, phase: Phase, replica_id: str) -> ReplicaStatus | WorkerFault:
        answer: ReplicaStatus | WorkerFault = await self._call(phase, "status", replica_id)
        return answer

    async def metrics(self, phase: Phase, replica_id: str) -> bytes | WorkerFault:
        """The replica's metrics in Prometheus' text form."""
        answer: bytes | WorkerFault = await self._call(phase, "metrics", replica_id)
        return answer

    async def ledger(self, phase: Phase, replica_id: str) -> LedgerSnapshot | WorkerFault:
        """Who has which of the replica's pages."""
        answer: LedgerSnapshot | WorkerFault = await self._call(phase, "ledger", replica_id)
        return answer

    async def _call(self, phase: Phase, method: str, replica_id: str, *args: object) -> Any:
        called = self._methods[phase, self._pool_of(phase, replica_id), method]
        return await settled(called.remote(*args, to=replica_id), method)

    def _pool_of(self, phase: Phase, replica_id: str) -> int:
        """A replica that nobody has is looked for in the first pool, whose router says that it is gone."""
        held = (n for n, handle in enumerate(self._pools[phase]) if replica_id in _replicas(handle))
        return next(held, 0)


def _replicas(handle: Any) -> tuple[str, ...]:
    return replica_table.replicas(handle.app_name, handle.deployment_name)


class Response(Protocol[T]):  # type: ignore[misc]
    """The part of a Serve `DeploymentResponse` that is used here."""

    def __await__(self) -> Any: ...

    def cancel(self) -> Any: ...


async def settled(response: Response[T], method: str) -> T | WorkerFault:
    """The response's value; what it raises becomes a fault. Being cancelled cancels the remote call.

    A remote exception's text is a traceback with addresses: it goes to the log, never further.
    """
    try:
        return await _as_awaitable(response)
    except asyncio.CancelledError:
        response.cancel()
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Not we were cancelled, but the call: by a replica that shuts down, or by Serve, which ends the calls
        # of a request whose client is gone before it ends the request. It says nothing about the engine.
        return WorkerFault(kind=FaultKind.CANCELLED, detail=f"{method}: the call was cancelled")
    except Exception as error:
        cause = getattr(error, "cause", None) or error
        log.warning("engine.call.failed method=%s error=%s", method, type(cause).__name__, exc_info=error)
        return WorkerFault(kind=classify(error, cause), detail=f"{method}: {type(cause).__name__}")


async def _as_awaitable(response: Awaitable[T]) -> T:
    return await response


def classify(error: BaseException, cause: BaseException) -> FaultKind:
    """What a remote call's exception means for the request."""
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError

    full = (BackPressureError, replica_table.ReplicaFull)
    if isinstance(error, full) or isinstance(cause, full):
        return FaultKind.BUSY
    if isinstance(error, RayActorError | LookupError) or isinstance(cause, RayActorError):
        return FaultKind.ENGINE_DEAD
    return FaultKind.INTERNAL


async def as_value(work: Awaitable[T | WorkerFault]) -> T | WorkerFault:
    """A pool answers with values; should it raise after all, the request still needs an end."""
    try:
        return await work
    except Exception as error:
        log.exception("engine.call.raised")
        return WorkerFault(kind=FaultKind.INTERNAL, detail=type(error).__name__)
