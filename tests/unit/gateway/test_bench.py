"""The model that comes through Serve handles: the same gateway, another way for tokens."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from gateway.bench import SUFFIX, HandlePool, Part, add_handle_model
from tests.support.gateways import AUTH, CHAT, MODEL, running_gateway
from tests.support.replicas import a_decode
from workers.api import DecodeResult, FaultKind, FinishReason, Item, WorkerFault
from workers.api.bus import encode_item

RESULT = DecodeResult(
    output_tokens=2, finish_reason=FinishReason.STOP, cached_tokens=0, handoff=None, seconds=1.0
)


def item(index: int, *token_ids: int) -> bytes:
    return encode_item(Item(request_id="r1", attempt=0, first_index=index, token_ids=token_ids))


class Parts:
    """A streaming Serve response."""

    def __init__(self, parts: list[Part], *, waits: bool) -> None:
        self._parts = parts
        self._waits = waits
        self.cancelled = False

    async def __aiter__(self) -> AsyncGenerator[Part, None]:
        for part in self._parts:
            yield part
        if self._waits:
            await asyncio.Event().wait()

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Handle:
    """The part of a Serve handle that the pool uses."""

    parts: list[Part] = field(default_factory=list)
    waits: bool = False
    app_name: str = "app"
    deployment_name: str = "Decode"
    calls: list[tuple[Any, str]] = field(default_factory=list)
    responses: list[Parts] = field(default_factory=list)

    def options(self, **_: Any) -> "Handle":
        return self

    def remote(self, request: Any, *, to: str) -> Parts:
        self.calls.append((request, to))
        self.responses.append(Parts(self.parts, waits=self.waits))
        return self.responses[-1]


async def test_items_are_handed_on_in_order_and_the_result_is_returned() -> None:
    handle, taken = Handle([item(0, 1), item(1, 2), RESULT]), list[Item]()

    result = await HandlePool(Handle(), handle, taken.append).decode("d1", a_decode())

    assert result == RESULT
    assert [each.token_ids for each in taken] == [(1,), (2,)]
    assert [to for _, to in handle.calls] == ["d1"]


async def test_a_stream_without_an_end_is_a_fault() -> None:
    result = await HandlePool(Handle(), Handle([item(0, 1)]), [].append).decode("d1", a_decode())

    assert isinstance(result, WorkerFault)
    assert result.kind is FaultKind.INTERNAL


async def test_cancelling_the_call_cancels_the_remote_one() -> None:
    handle = Handle(waits=True)
    calling = asyncio.create_task(HandlePool(Handle(), handle, [].append).decode("d1", a_decode()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait({calling})

    assert calling.cancelled()
    assert handle.responses[0].cancelled


async def test_the_model_is_there_a_second_time_and_both_share_everything_else() -> None:
    async with running_gateway() as gateway:
        services = gateway.app.state.services
        served = services.models[0]
        gateway.app.state.services = type(services)(
            **{name: getattr(services, name) for name in services.__dataclass_fields__}
            | {"models": (served,)}
        )
        add_handle_model(gateway.app, Handle(), Handle())
        listed = await gateway.client.get("/v1/models", headers=AUTH)
        answer = await gateway.client.post(
            CHAT, json={"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}, headers=AUTH
        )

    assert [model["id"] for model in listed.json()["data"]] == [MODEL, MODEL + SUFFIX]
    assert answer.status_code == 200  # the first one's tokens still come over the bus
    first, second = gateway.app.state.services.models
    assert first.engines.bus is second.engines.bus
    assert first.engines.fleet is second.engines.fleet
    assert first.renderer is second.renderer
