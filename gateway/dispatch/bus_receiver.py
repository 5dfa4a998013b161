"""Receive side of the token bus: one socket, frames from every attached engine."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec
import zmq
import zmq.asyncio

from kv_transfer.api import Gate, Membership
from workers.api import BUS_VERSION, Frame, Item
from workers.api.bus import decode

log = logging.getLogger(__name__)

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""A step of 1,024 requests is about 100 kB; anything near this bound is not a frame."""


class BusReceiver:
    """Hands items to whoever subscribed to their request, and tells of every frame that came.

    Items of requests that nobody subscribed to are old news and dropped. A malformed frame is counted and
    ignored: it must not end the streams of other engines.
    """

    def __init__(self, host: str, on_frame: Callable[[Frame], None], membership: Membership) -> None:
        self._host = host
        self._membership = membership
        self._gate: Gate | None = None
        self._on_frame = on_frame
        self._takers: dict[str, Callable[[Item], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._context: zmq.asyncio.Context | None = None
        self.address = ""
        """Where engines connect; empty before `start`."""
        self.malformed = 0
        self.unclaimed = 0
        self.refused = 0
        """Clients that did not know the membership key."""

    def start(self) -> None:
        """Bind to a random port and receive until `close`. Needs a running event loop."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 10_000)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._gate = self._membership.gate(self._context, self._on_refused)
        self._membership.server(socket)
        port = socket.bind_to_random_port(f"tcp://{self._host}")
        self.address = f"tcp://{self._host}:{port}"
        self._task = asyncio.create_task(self._receive(socket), name="token-bus")

    @property
    def ended(self) -> bool:
        """Whether nobody listens any more, though nobody has closed it."""
        return self._task is not None and self._task.done()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._gate is not None:
            self._gate.stop()
        if self._context is not None:
            self._context.destroy(linger=0)

    def subscribe(self, request_id: str, take: Callable[[Item], None]) -> None:
        """`take` gets every item of the request, on the event loop, until `unsubscribe`."""
        self._takers[request_id] = take

    def unsubscribe(self, request_id: str) -> None:
        self._takers.pop(request_id, None)

    def _on_refused(self) -> None:
        self.refused += 1

    @property
    def subscribed(self) -> int:
        return len(self._takers)

    def feed(self, data: bytes) -> None:
        """One message from the socket."""
        try:
            frame = decode(data)
        except (RecursionError, msgspec.DecodeError) as bad:
            self.malformed += 1
            log.warning("bus.malformed bytes=%d reason=%s", len(data), type(bad).__name__)
            return
        if frame.version != BUS_VERSION:
            self.malformed += 1
            log.warning("bus.version engine=%s version=%d", frame.engine_id, frame.version)
            return
        self._on_frame(frame)
        for item in frame.items:
            self.hand(item)

    def hand(self, item: Item) -> None:
        """Give an item to whoever subscribed to its request."""
        take = self._takers.get(item.request_id)
        if take is None:
            self.unclaimed += 1
        else:
            take(item)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        with socket:
            while True:
                self.feed(await socket.recv())
