"""Both ends in one process: tests and single-process experiments."""

import threading
from collections import deque

import torch

from kv_transfer.api.errors import TransferCause, TransferError


class _Channel:
    """Bytes in one direction; a send completes when a receive has taken it, as on a real link."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.waiting: deque[torch.Tensor] = deque()
        self.taken = 0
        self.offered = 0


class LoopbackLink:
    """One end. Make both with `pair`."""

    def __init__(self, out: _Channel, into: _Channel, state: dict[str, bool], timeout_s: float) -> None:
        self._out, self._in, self._state, self._timeout_s = out, into, state, timeout_s

    @classmethod
    def pair(cls, *, timeout_s: float = 5.0) -> tuple["LoopbackLink", "LoopbackLink"]:
        changed = threading.Condition()
        there, back, state = _Channel(changed), _Channel(changed), {"closed": False}
        return cls(there, back, state, timeout_s), cls(back, there, state, timeout_s)

    def _wait(self, channel: _Channel, number: int) -> None:
        done = channel.changed.wait_for(
            lambda: channel.taken >= number or self._state["closed"], self._timeout_s
        )
        if channel.taken >= number:
            return
        cause = TransferCause.LINK_DOWN if done else TransferCause.DEADLINE
        raise TransferError(cause, "loopback")

    def send(self, data: torch.Tensor) -> None:
        with self._out.changed:
            if self._state["closed"]:
                raise TransferError(TransferCause.LINK_DOWN, "loopback")
            self._out.waiting.append(data.clone())
            self._out.offered += 1
            number = self._out.offered
            self._out.changed.notify_all()
            self._wait(self._out, number)

    def recv(self, into: torch.Tensor) -> None:
        with self._in.changed:
            arrived = self._in.changed.wait_for(
                lambda: self._in.waiting or self._state["closed"], self._timeout_s
            )
            if not self._in.waiting:
                cause = TransferCause.LINK_DOWN if arrived else TransferCause.DEADLINE
                raise TransferError(cause, "loopback")
            data = self._in.waiting.popleft()
            self._in.taken += 1
            self._in.changed.notify_all()
        if data.numel() != into.numel():
            self.close()
            raise TransferError(TransferCause.LINK_DOWN, f"{data.numel()} bytes for {into.numel()}")
        into.copy_(data)

    def close(self) -> None:
        with self._out.changed:
            self._state["closed"] = True
            self._out.changed.notify_all()
