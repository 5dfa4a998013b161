import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from gateway.dispatch.pools import ServePool, settled
from gateway.routing import replica_table
from workers.api import FaultKind, Phase, WorkerFault


class FakeResponse:
    """A Serve response that ends as told, or waits to be cancelled."""

    def __init__(self, value: Any = None, error: BaseException | None = None, *, waits: bool = False) -> None:
        self._value, self._error, self._waits = value, error, waits
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        if self._waits:
            yield from asyncio.Event().wait().__await__()
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        self.cancelled = True


def wrapped(cause: Exception) -> Exception:
    """As a remote call raises it: an exception around the original one."""
    error = RuntimeError("Traceback with pid=1, ip=10.0.0.1")
    error.cause = cause  # type: ignore[attr-defined]
    return error


async def test_value_of_the_call_is_returned() -> None:
    assert await settled(FakeResponse("ok"), "decode") == "ok"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), FaultKind.INTERNAL),
        (wrapped(ValueError("x")), FaultKind.INTERNAL),
        (replica_table.ReplicaGone("gone"), FaultKind.ENGINE_DEAD),
        (wrapped(KeyError("theirs")), FaultKind.INTERNAL),
        (asyncio.CancelledError(), FaultKind.CANCELLED),
    ],
)
async def test_what_a_call_raises_becomes_a_fault_without_its_text(
    error: BaseException, kind: FaultKind
) -> None:
    fault = await settled(FakeResponse(error=error), "decode")

    assert isinstance(fault, WorkerFault)
    assert fault.kind is kind
    assert "10.0.0.1" not in fault.detail


async def test_dead_actor_is_a_dead_engine() -> None:
    from ray.exceptions import ActorDiedError

    fault = await settled(FakeResponse(error=ActorDiedError()), "decode")

    assert isinstance(fault, WorkerFault)
    assert fault.kind is FaultKind.ENGINE_DEAD


async def test_cancelling_the_caller_cancels_the_remote_call() -> None:
    response = FakeResponse(waits=True)
    task = asyncio.create_task(settled(response, "decode"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    assert response.cancelled
    assert task.cancelled()


class FakeHandle:
    app_name = "tests"

    def __init__(self, deployment_name: str) -> None:
        self.deployment_name = deployment_name
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def options(self, *, method_name: str) -> Any:
        handle = self

        class Method:
            def remote(self, *args: Any, **kwargs: Any) -> FakeResponse:
                handle.calls.append((method_name, args, kwargs))
                return FakeResponse("answer")

        return Method()


async def test_calls_go_to_the_named_replica_of_the_right_deployment() -> None:
    prefill, decode = FakeHandle("Prefill"), FakeHandle("Decode")
    pool = ServePool(prefill, decode)
    replica_table.publish("tests", "Decode", ("d1", "d2"))

    await pool.refetch("d2", "request", 7)
    await pool.attach(Phase.PREFILL, "p1", "gateway", "tcp://bus")

    assert decode.calls == [("refetch", ("request", 7), {"to": "d2"})]
    assert prefill.calls == [("attach", ("gateway", "tcp://bus"), {"to": "p1"})]
    assert pool.replicas(Phase.DECODE) == ("d1", "d2")
    assert pool.replicas(Phase.PREFILL) == ()


async def test_a_second_pool_of_decode_is_called_for_its_own_replicas() -> None:
    prefill, decode, dense = FakeHandle("Prefill"), FakeHandle("Wide"), FakeHandle("Dense")
    pool = ServePool(prefill, decode, dense)
    replica_table.publish("tests", "Wide", ("w1",))
    replica_table.publish("tests", "Dense", ("d1",))

    await pool.refetch("d1", "request", 7)
    await pool.refetch("w1", "request", 7)
    await pool.refetch("gone", "request", 7)

    assert [call[2]["to"] for call in dense.calls] == ["d1"]
    assert [call[2]["to"] for call in decode.calls] == ["w1", "gone"]
    assert pool.replicas(Phase.DECODE) == ("w1", "d1")
