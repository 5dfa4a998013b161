"""The sending side of the token bus.

Items of one pass of the event loop leave as one frame per gateway: the first item of a pass schedules the
flush, and the loop runs it after every task that the same engine step woke. Nothing here waits for a gateway.
A frame that does not fit a gateway's queue is dropped and counted: the receiver sees the gap in the indices
and fetches the tokens again.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from workers.api import BUS_VERSION, Frame, Gauges, Item
from workers.api.bus import encode
from workers.bus.sink import FrameSink, OpenSink

AWAY_AFTER_BEATS: Final = 10
"""A gateway not connected for so many heartbeats in a row is gone: nobody reads its requests' tokens."""
FORGET_AFTER_BEATS: Final = 20
"""A gateway not connected for so many heartbeats is forgotten."""

DropFrame = Callable[[Frame], bool]

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Gateway:
    address: str
    sink: FrameSink
    pending: list[Item] = field(default_factory=list)
    beats_away: int = 0


class Publisher:
    """Owned by one event loop."""

    def __init__(self, engine_id: str, open_sink: OpenSink, *, drop: DropFrame | None = None) -> None:
        """
        Args:
            drop: loses the frames for which it is true. For tests of the receiver only.
        """
        self._engine_id = engine_id
        self._open_sink = open_sink
        self._drop = drop
        self._gateways: dict[str, _Gateway] = {}
        self._flushed = asyncio.Event()
        self._flushed.set()
        self.dropped_items = 0
        """Items that no socket accepted."""

    @property
    def bus_queue(self) -> int:
        """Items published and not yet handed to a socket."""
        return sum(len(gateway.pending) for gateway in self._gateways.values())

    @property
    def gateways(self) -> tuple[str, ...]:
        return tuple(self._gateways)

    @property
    def away(self) -> frozenset[str]:
        """Gateways that were connected or ought to be, and have not been for `AWAY_AFTER_BEATS`."""
        return frozenset(
            gateway_id
            for gateway_id, gateway in self._gateways.items()
            if gateway.beats_away >= AWAY_AFTER_BEATS
        )

    def attach(self, gateway_id: str, address: str) -> None:
        """Send to this gateway from now on. Repeating it changes nothing; a new address replaces the old."""
        known = self._gateways.get(gateway_id)
        if known is not None and known.address == address:
            return
        sink = self._open_sink(address)  # may refuse the address: then everything stays as it was
        if known is not None:
            known.sink.close()
        self._gateways[gateway_id] = _Gateway(address, sink)

    def publish(self, gateway_id: str, item: Item) -> None:
        """Queue an item for the frame of this pass."""
        gateway = self._gateways.get(gateway_id)
        if gateway is None:
            self.dropped_items += 1
            return
        gateway.pending.append(item)
        if self._flushed.is_set():
            self._flushed.clear()
            asyncio.get_running_loop().call_soon(self._flush)

    async def flushed(self) -> None:
        """Return when everything published so far was handed over or dropped."""
        await self._flushed.wait()

    def heartbeat(self, gauges: Gauges) -> None:
        """Tell every gateway that the engine lives; forget the gateways that are gone."""
        frame = encode(Frame(version=BUS_VERSION, engine_id=self._engine_id, items=(), gauges=gauges))
        for gateway_id, gateway in list(self._gateways.items()):
            gateway.beats_away = 0 if gateway.sink.connected() else gateway.beats_away + 1
            if gateway.beats_away >= FORGET_AFTER_BEATS:
                log.info("gateway %s is gone and forgotten", gateway_id)
                self._forget(gateway_id)
            elif gateway.beats_away == 0:
                gateway.sink.send(frame)

    def close(self) -> None:
        for gateway_id in list(self._gateways):
            self._forget(gateway_id)

    def _forget(self, gateway_id: str) -> None:
        gateway = self._gateways.pop(gateway_id)
        self.dropped_items += len(gateway.pending)
        gateway.sink.close()

    def _flush(self) -> None:
        self._flushed.set()
        for gateway_id, gateway in self._gateways.items():
            if not gateway.pending:
                continue
            items, gateway.pending = tuple(gateway.pending), []
            frame = Frame(version=BUS_VERSION, engine_id=self._engine_id, items=items)
            lost_on_purpose = self._drop is not None and self._drop(frame)
            if lost_on_purpose or not gateway.sink.send(encode(frame)):
                self.dropped_items += len(items)
                log.warning(
                    "bus frame to gateway %s dropped; requests %s",
                    gateway_id,
                    ",".join(sorted({item.request_id for item in items})),
                )


def drop_nth(n: int) -> DropFrame:
    """Loses the n-th frame that carries items, counted from 1, and no other."""
    seen = 0

    def drop(_: Frame) -> bool:
        nonlocal seen
        seen += 1
        return seen == n

    return drop
