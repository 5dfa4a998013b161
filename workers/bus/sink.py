"""Where encoded frames leave: one ZeroMQ PUSH socket per gateway."""

from collections.abc import Callable
from typing import Final, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from kv_transfer.api import Membership

QUEUED_FRAMES: Final = 4096
"""At one frame per engine step of 20 ms: more than a minute of a gateway that reads nothing."""

_KEEPALIVE_MS: Final = 2000


class FrameSink(Protocol):
    def send(self, frame: bytes) -> bool:
        """Hand a frame over without waiting; False when the queue is full."""

    def connected(self) -> bool:
        """Whether the gateway is there now."""

    def close(self) -> None: ...


OpenSink = Callable[[str], FrameSink]


class ZmqSink:
    """Connects in the background; frames queue meanwhile."""

    def __init__(self, address: str, *, membership: Membership, queued_frames: int = QUEUED_FRAMES) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, queued_frames)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _KEEPALIVE_MS)
        self._events: zmq.Socket[bytes] = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._connected = False
        membership.client(self._socket)
        self._socket.connect(address)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def connected(self) -> bool:
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return self._connected

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
        self._socket.close(linger=0)
