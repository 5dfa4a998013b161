"""The same gateway with its model a second time, whose tokens come through Serve handles: for measuring only.

Both models share everything but the pool's `decode`: admission, rendering, dispatch, detokeniser, SSE.
"""

from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import replace
from typing import Any, Final

from starlette.applications import Starlette

from gateway.dispatch.pools import ServePool, settled
from gateway.services import Services
from workers.api import DecodeRequest, DecodeResult, FaultKind, Item, WorkerFault
from workers.api.bus import decode_item

SUFFIX: Final = "-through-handle"
"""Of the second model's id."""

Part = bytes | DecodeResult | WorkerFault


class HandlePool(ServePool):
    """Decode's items are the parts of its call's answer, not frames of the token bus."""

    def __init__(self, prefill: Any, decode: Any, hand: Callable[[Item], None]) -> None:
        """
        Args:
            hand: where the token bus would take an item.
        """
        super().__init__(prefill, decode)
        self._stream = decode.options(method_name="stream", stream=True)
        self._hand = hand

    async def decode(self, replica_id: str, request: DecodeRequest) -> DecodeResult | WorkerFault:
        parts = self._stream.remote(request, to=replica_id)
        return await settled(Relayed(parts, self._hand), "stream")


class Relayed:
    """A streaming response as an awaitable one: hands items on, and returns what comes last."""

    def __init__(self, parts: Any, hand: Callable[[Item], None]) -> None:
        self._parts = parts
        self._hand = hand

    def __await__(self) -> Generator[Any, None, DecodeResult | WorkerFault]:
        return self._relay(self._parts).__await__()

    def cancel(self) -> None:
        self._parts.cancel()

    async def _relay(self, parts: AsyncIterator[Part]) -> DecodeResult | WorkerFault:
        async for part in parts:
            if not isinstance(part, bytes):
                return part
            self._hand(decode_item(part))
        return WorkerFault(kind=FaultKind.INTERNAL, detail="stream: no end")


def add_handle_model(app: Starlette, prefill: Any, decode: Any) -> None:
    """From now on the gateway's one model can also be asked for under its id with `SUFFIX`."""
    services: Services = app.state.services
    (served,) = services.models
    engines = served.engines
    second = replace(
        served,
        facts=replace(served.facts, id=served.facts.id + SUFFIX, aliases=()),
        engines=replace(engines, pool=HandlePool(prefill, decode, engines.bus.hand)),
    )
    app.state.services = replace(services, models=(served, second))
