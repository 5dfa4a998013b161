"""The thread that talks to peers: control sockets, deadlines and lanes of one worker.

The engine thread never waits for a peer: it leaves work here with `later` and picks up what has ended.
"""

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import torch
import zmq

from kv_transfer.api.errors import TransferError
from kv_transfer.api.page import Layout, Scales
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.peers import MOST_MESSAGE_BYTES, Peers, watch_connection
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
ASK_EVERY_S = 1.0
"""How often peers that pages are held for are looked after."""
PARK_S = 60.0
"""Longest that an offer waits for its announcement: a request may queue that long on the prefill side."""


class Courier:
    def __init__(
        self,
        config: ConnectorConfig,
        *,
        rank: int,
        layout: Layout,
        scales: Scales = (),
        device: torch.device,
        through: Callable[[Link], Link] = lambda link: link,
    ) -> None:
        """`through`: what a link is used through."""
        self._through = through
        self._config = config
        self._device = device
        self._watchdog = Watchdog()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        membership = config.membership()
        self._zmq = zmq.Context(1)
        self._malformed = 0
        self._strangers = 0
        self._gate = membership.gate(self._zmq, self._refused_stranger)
        self._router = self._zmq.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a peer that is gone shows when it is sent to
        watch_connection(self._router)
        membership.server(self._router)
        port = self._router.bind_to_random_port(f"tcp://{config.bind_host}")
        self.address = f"tcp://{config.bind_host}:{port}"
        self._poller = zmq.Poller()
        self._peers = Peers(self._zmq, membership, self._poller, time.monotonic)
        self._lost_routes: set[bytes] = set()
        self._asked_at = time.monotonic()
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._stopping = False
        self.failure: BaseException | None = None
        """What ended the thread, if it was not `close`. The engine must not go on without it."""
        self.sender = Sender(
            engine_id=config.engine_id,
            contract=config.contract,
            layout=layout,
            scales=scales,
            wire=self,
            later=self.later,
            park_s=PARK_S,
            staging_bytes=config.staging_bytes,
            now=time.monotonic,
        )
        self.receiver = Receiver(
            engine_id=config.engine_id,
            rank=rank,
            contract=config.contract,
            layout=layout,
            scales=scales,
            device=device,
            wire=self,
            later=self.later,
            drain_s=config.drain_s,
            staging_bytes=config.receive_staging_bytes,
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
        self._peers.tell(address, message)

    def tell_receiver(self, route: bytes, message: m.ToReceiver) -> None:
        if not route:
            return  # it has never spoken to us
        try:
            self._router.send_multipart([route, m.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as failed:
            if failed.errno == zmq.EHOSTUNREACH:
                self._lost_routes.add(route)
            else:
                log.warning("control message dropped", extra={"kind": type(message).__name__})

    def open_lane(self, address: str, down: Callable[[TransferError], None]) -> tuple[Lane, m.LinkAddress]:
        meeting = MeetingPoint.open(self._config.bind_host)
        link = m.LinkAddress(
            link_id=secrets.token_hex(16),
            host=meeting.host,
            port=meeting.port,
            backend=self._config.backend,
        )

        def connect() -> Link:
            # The store is served only while the group is built: nothing listens there afterwards.
            serving = meeting.serve(self._config.link_timeout_s)
            mine = join(link.host, link.port, self._config.link_timeout_s)
            built = self._link(mine, link, RECEIVER)
            del serving
            return built

        return Lane(f"recv-{meeting.port}", connect, down, meeting.close), link

    def join_lane(self, link: m.LinkAddress, down: Callable[[TransferError], None]) -> Lane:
        def connect() -> Link:
            return self._link(join(link.host, link.port, self._config.link_timeout_s), link, SENDER)

        lane = Lane(f"send-{link.port}", connect, down)
        lane.start()
        return lane

    def _link(self, store: object, link: m.LinkAddress, rank: int) -> Link:
        built = TorchLink(
            store=store,
            link_id=link.link_id,
            rank=rank,
            host=self._config.bind_host,
            backend=link.backend,
            device=self._device,
            timeout_s=self._config.link_timeout_s,
            watchdog=self._watchdog,
        )
        return self._through(built)

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
        for address, message in self._peers.heard():
            self.receiver.on_message(address, message)
        self._notice_lost()
        self.sender.tick()
        self.receiver.tick()

    def _drain_router(self) -> None:
        while self._router.poll(0):
            frames = self._router.recv_multipart()
            try:
                route, data = frames
                message = m.decode_to_sender(data)
            except (ValueError, RecursionError, msgspec.DecodeError):
                self._malformed += 1
                log.warning("malformed control message ignored")
                continue
            if isinstance(message, m.CountRequest):
                self.tell_receiver(route, self._count())
            else:
                self.sender.on_message(route, message)

    def _count(self) -> m.Count:
        return m.Count(
            in_flight=self.sender.in_flight() + self.receiver.in_flight(),
            malformed=self._malformed + self._peers.malformed,
            strangers=self._strangers,
        )

    def _refused_stranger(self) -> None:
        self._strangers += 1  # the gate's thread writes, nobody else

    def _notice_lost(self) -> None:
        for address in self._peers.take_lost():
            log.warning("peer is gone", extra={"peer": address})
            self.receiver.peer_lost(address)
        if time.monotonic() - self._asked_at >= ASK_EVERY_S:
            self._asked_at = time.monotonic()
            for route in self.sender.routes():
                self.tell_receiver(route, m.Alive())
        while self._lost_routes:
            self.sender.peer_lost(self._lost_routes.pop())

    def _close_all(self) -> None:
        self.sender.close()
        self.receiver.close()
        self._watchdog.close()
        self._peers.close()
        self._router.close()
        self._gate.stop()
        self._zmq.term()
        self._wake_in.close()
        self._wake_out.close()
