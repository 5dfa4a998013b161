"""A link over a 2-rank torch.distributed group: NCCL on CUDA, Gloo on CPU, one code path.

The group is stateless: it never touches the process's default group, which belongs to vLLM.
"""

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.transport.watchdog import Watchdog

RECEIVER, SENDER = 0, 1
"""Ranks in the group. The receiver serves the store."""


def _gloo(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    # Binds to the internal interface, whatever the host name resolves to.
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Store, rank: int, host: str, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, 2, options)


BACKENDS = {"gloo": _gloo, "nccl": _nccl}


class TorchLink:
    """One end of a 2-rank group; `send` and `recv` are called from one thread."""

    def __init__(
        self,
        *,
        store: Store,
        link_id: str,
        rank: int,
        host: str,
        backend: str,
        device: torch.device,
        timeout_s: float,
        watchdog: Watchdog,
    ) -> None:
        """Blocks until the peer has joined, at most `timeout_s`.

        Raises:
            TransferError: LINK_DOWN when the group could not be built.
        """
        self._peer = SENDER if rank == RECEIVER else RECEIVER
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._closed = False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        try:
            self._group = BACKENDS[backend](
                PrefixStore(link_id, store), rank, host, timedelta(seconds=timeout_s)
            )
            # A first byte each way: Gloo connects lazily, and a link must fail here, not under a page.
            hello = torch.zeros(1, dtype=torch.uint8, device=device)
            first, second = (self.recv, self.send) if rank == RECEIVER else (self.send, self.recv)
            first(hello)
            second(hello)
        except TransferError:
            self.close()
            raise
        except RuntimeError as failed:
            raise TransferError(TransferCause.LINK_DOWN, str(failed).split("\n", 1)[0]) from failed

    def send(self, data: torch.Tensor) -> None:
        self._run(lambda: self._group.send([data], self._peer, 0))

    def recv(self, into: torch.Tensor) -> None:
        self._run(lambda: self._group.recv([into], self._peer, 0))

    def _run(self, post: Any) -> None:
        if self._closed:
            raise TransferError(TransferCause.LINK_DOWN, "link is closed")
        with self._watchdog.guard(self._timeout_s, self.close) as guard:
            try:
                if self._stream is None:
                    post().wait(timedelta(seconds=self._timeout_s))
                else:
                    with torch.cuda.stream(self._stream):
                        post().wait()
                    self._stream.synchronize()
            except RuntimeError as failed:
                late = guard.fired or "imed out" in str(failed)
                self.close()
                cause = TransferCause.DEADLINE if late else TransferCause.LINK_DOWN
                raise TransferError(cause, str(failed).split("\n", 1)[0]) from failed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if hasattr(self, "_group"):
                self._group.abort()
