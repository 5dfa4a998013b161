"""The thread that talks to peers: control sockets, deadlines and lanes of one worker.

The engine thread never waits for a peer: it leaves work here with `later` and picks up what has ended.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch
import zmq

from kv_transfer.api.errors import TransferError
from kv_transfer.api.page import Layout
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.receiver import Receiver
from kv_transfer.connector.sender import Sender
from kv_transfer.protocol import messages as m
from kv_transfer.transport.base import Link
from kv_transfer.transport.lane import Lane
from kv_transfer.transport.rendezvous import MeetingPoint, join
from kv_transfer.transport.torch_p2p import RECEIVER, SENDER, TorchLink
from kv_transfer.transport.watchdog import Watchdog

log = logging.getLogger(__name__)

TICK_MS = 50
"""How late a deadline may be noticed."""
MOST_MESSAGE_BYTES = 64 * 2**10
"""Control messages have a few hundred bytes; page bytes never travel in them."""
PARK_S = 60.0
"""Longest that an offer waits for its announcement: a request may queue that long on the prefill side."""


class Courier:
    def __init__(self, config: ConnectorConfig, *, rank: int, layout: Layout, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._watchdog = Watchdog()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._zmq = zmq.Context(1)
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        port = self._router.bind_to_random_port(f"tcp://{config.bind_host}")
        self.address = f"tcp://{config.bind_host}:{port}"
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._stopping = False
        self.failure: BaseException | None = None
        """What ended the thread, if it was not `close`. The engine must not go on without it."""
        self.sender = Sender(
            layout=layout,
            wire=self,
            later=self.later,
            park_s=PARK_S,
            staging_bytes=config.staging_bytes,
            now=time.monotonic,
        )
        self.receiver = Receiver(
            engine_id=config.engine_id,
            rank=rank,
            layout=layout,
            device=device,
            wire=self,
            later=self.later,
            drain_s=config.drain_s,
            now=time.monotonic,
        )
        self._thread = threading.Thread(target=self._run, name="phasegate-courier", daemon=True)
        self._thread.start()

    def later(self, call: Callable[[], None]) -> None:
        """Run `call` on the courier's thread, after everything left here before. From any thread."""
        self._work.put(call)
        # Full: wake-ups enough are waiting. Closed: nobody is left to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"\0")

    def close(self) -> None:
        """Abandon all transfers, close sockets and lanes."""
        self._stopping = True
        self.later(lambda: None)
        self._thread.join(timeout=5)

    # -- what the sender and the receiver may ask for (courier thread)

    def tell_sender(self, address: str, message: m.ToSender) -> None:
        dealer = self._dealers.get(address)
        if dealer is None:
            dealer = self._zmq.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
            dealer.connect(address)
            self._poller.register(dealer, zmq.POLLIN)
            self._dealers[address] = dealer
        try:
            dealer.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("control queue full, message dropped", extra={"peer": address})

    def tell_receiver(self, route: bytes, message: m.ToReceiver) -> None:
        try:
            self._router.send_multipart([route, m.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            log.warning("control message dropped", extra={"kind": type(message).__name__})

    def open_lane(self, address: str, down: Callable[[TransferError], None]) -> tuple[Lane, m.LinkAddress]:
        meeting = MeetingPoint.open(self._config.bind_host)
        link = m.LinkAddress(
            link_id=f"{self._config.engine_id}-{meeting.port}-{time.monotonic_ns():x}",
            host=meeting.host,
            port=meeting.port,
            backend=self._config.backend,
        )

        def connect() -> Link:
            return self._link(meeting.serve(self._config.link_timeout_s), link, RECEIVER)

        return Lane(f"recv-{meeting.port}", connect, down), link

    def join_lane(self, link: m.LinkAddress, down: Callable[[TransferError], None]) -> Lane:
        def connect() -> Link:
            return self._link(join(link.host, link.port, self._config.link_timeout_s), link, SENDER)

        return Lane(f"send-{link.port}", connect, down)

    def _link(self, store: object, link: m.LinkAddress, rank: int) -> Link:
        return TorchLink(
            store=store,
            link_id=link.link_id,
            rank=rank,
            host=self._config.bind_host,
            backend=link.backend,
            device=self._device,
            timeout_s=self._config.link_timeout_s,
            watchdog=self._watchdog,
        )

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as failure:
            self.failure = failure
            log.exception("courier died")
            raise
        finally:
            self._close_all()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(TICK_MS))
        if self._wake_out.fileno() in ready:
            self._wake_out.recv(4096)
        while not self._work.empty():
            self._work.get()()
        if self._router in ready:
            self._drain_router()
        for address, dealer in list(self._dealers.items()):
            if dealer in ready:
                self._drain_dealer(address, dealer)
        self.sender.tick()
        self.receiver.tick()

    def _drain_router(self) -> None:
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            try:
                route, data = frames
                message = m.decode_to_sender(data)
            except (ValueError, RecursionError, msgspec.DecodeError):
                log.warning("malformed control message ignored")
                continue
            if isinstance(message, m.CountRequest):
                count = m.Count(in_flight=self.sender.in_flight() + self.receiver.in_flight())
                self.tell_receiver(route, count)
            else:
                self.sender.on_message(route, message)

    def _drain_dealer(self, address: str, dealer: "zmq.Socket[bytes]") -> None:
        while dealer.poll(0):
            try:
                message = m.decode_to_receiver(dealer.recv())
            except (RecursionError, msgspec.DecodeError):
                log.warning("malformed control message ignored", extra={"peer": address})
                continue
            self.receiver.on_message(address, message)

    def _close_all(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._watchdog.close()
        for dealer in self._dealers.values():
            dealer.close()
        self._router.close()
        self._zmq.term()
        self._wake_in.close()
        self._wake_out.close()
