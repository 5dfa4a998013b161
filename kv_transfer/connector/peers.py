"""The prefill workers that a decode worker talks to: one socket each, and the knowledge of who is gone."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.api.membership import Membership
from kv_transfer.protocol import messages as m

log = logging.getLogger(__name__)

MOST_MESSAGE_BYTES: Final = 64 * 2**10
"""Control messages have a few hundred bytes; page bytes never travel in them."""
CONNECT_S: Final = 5.0
"""A peer that has not shaken hands for so long is taken for gone."""
HEARTBEAT_MS: Final = 1000
SILENCE_MS: Final = 4000
"""libzmq's own threads answer heartbeats, so a long step is no silence; a stopped process or machine is."""

_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


def watch_connection(socket: "zmq.Socket[bytes]") -> None:
    """Call before `bind` or `connect`: a peer that falls silent counts as disconnected."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)


@dataclass
class _Peer:
    socket: "zmq.Socket[bytes]"
    events: "zmq.Socket[bytes]"
    since: float
    """When it was last not connected."""
    connected: bool = False


class Peers:
    """Used by the courier's thread only."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        membership: Membership,
        poller: zmq.Poller,
        now: Callable[[], float],
    ) -> None:
        self._context, self._membership, self._poller, self._now = context, membership, poller, now
        self._peers: dict[str, _Peer] = {}
        self.malformed = 0

    def __len__(self) -> int:
        return len(self._peers)

    def tell(self, address: str, message: m.ToSender) -> None:
        """Queue a message; never blocks. A peer that is new is connected to first."""
        peer = self._peers.get(address) or self._connect(address)
        try:
            peer.socket.send(m.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            log.warning("control queue full, message dropped", extra={"peer": address})

    def heard(self) -> Iterator[tuple[str, m.ToReceiver]]:
        """What has come in since the last call, with the address of who said it."""
        for address, peer in list(self._peers.items()):
            while peer.socket.poll(0):
                try:
                    message = m.decode_to_receiver(peer.socket.recv())
                except (RecursionError, msgspec.DecodeError):
                    self.malformed += 1
                    log.warning("malformed control message ignored", extra={"peer": address})
                    continue
                yield address, message

    def take_lost(self) -> list[str]:
        """Peers that are gone since the last call. They are forgotten: the next message connects anew."""
        lost = [address for address, peer in self._peers.items() if self._gone(peer)]
        for address in lost:
            self._forget(address)
        return lost

    def close(self) -> None:
        for address in list(self._peers):
            self._forget(address)

    def _connect(self, address: str) -> _Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        watch_connection(socket)
        self._membership.client(socket)
        events = socket.get_monitor_socket(_EVENTS)
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(events, zmq.POLLIN)
        peer = self._peers[address] = _Peer(socket, events, self._now())
        return peer

    def _gone(self, peer: _Peer) -> bool:
        while peer.events.poll(0):
            if recv_monitor_message(peer.events)["event"] == zmq.EVENT_DISCONNECTED:
                return True
            peer.connected = True
        return not peer.connected and self._now() - peer.since > CONNECT_S

    def _forget(self, address: str) -> None:
        peer = self._peers.pop(address)
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.events)
        peer.socket.disable_monitor()
        peer.events.close(linger=0)
        peer.socket.close(linger=0)
