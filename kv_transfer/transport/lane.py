"""The thread that owns one link: it builds the link, then runs sends or receives in order."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
import xxhash

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.transport.base import Link


def checksum(data: torch.Tensor) -> int:
    """xxh3-64 of the bytes of a uint8 tensor. On CUDA the bytes are copied to the host first."""
    return xxhash.xxh3_64_intdigest(data.cpu().numpy())


class Fence:
    """A point in the engine's work that a lane must not overtake.

    On CUDA the page gather is only queued when the engine thread has returned; the lane waits for an
    event recorded behind it. On CPU the gather is over, and waiting returns at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def withheld(self) -> bool:
        """Once waited for: whether nothing may leave, announced or not. The transfer was given up then."""
        return False

    def void(self) -> bool:
        """Once waited for: whether what was gathered must not be used. It leaves blank then, with a wrong
        checksum: the receiver, who waits for so many bytes, drops them."""
        return False


@dataclass(frozen=True, slots=True)
class SendJob:
    data: torch.Tensor
    fence: Fence
    starting: Callable[[int], None]
    """Called with the checksum before the first byte leaves, from the lane's thread."""
    ended: Callable[[TransferError | None], None]


@dataclass(frozen=True, slots=True)
class RecvJob:
    into: torch.Tensor
    ended: Callable[[int, TransferError | None], None]
    """Called with the checksum of what arrived, from the lane's thread."""


class Lane:
    """Jobs of one link, first in first out. After the first failure every later job fails too."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Link],
        down: Callable[[TransferError], None],
        unused: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            connect: runs on the lane's thread, once the lane is started.
            down: called once, from there, when the link is lost.
            unused: called when the lane is closed without having been started.
        """
        self._jobs: queue.SimpleQueue[SendJob | RecvJob | None] = queue.SimpleQueue()
        self._connect, self._down, self._unused = connect, down, unused
        self._link: Link | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"phasegate-lane-{name}", daemon=True)
        self.started = False

    def start(self) -> None:
        """Build the link and work off jobs. Idempotent; from the owner's thread."""
        if not self.started and not self._closed:
            self.started = True
            self._thread.start()

    def submit(self, job: SendJob | RecvJob) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Fail what is queued and running. Does not wait for the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not self.started:
            self._unused()
            return
        if self._link is not None:
            self._link.close()
        self._jobs.put(None)

    def _run(self) -> None:
        failed: TransferError | None = None
        try:
            self._link = self._connect()
        except TransferError as unconnected:
            failed = unconnected
            self._down(failed)
        except Exception as unconnected:  # noqa: BLE001 - whatever it is, jobs must end
            failed = TransferError(TransferCause.LINK_DOWN, str(unconnected).split("\n", 1)[0])
            self._down(failed)
        while (job := self._jobs.get()) is not None:
            if self._closed and failed is None:
                failed = TransferError(TransferCause.LINK_DOWN, "link was closed")
                self._down(failed)
            error = failed or self._attempt(job)
            if isinstance(job, SendJob):
                job.ended(error)
            else:
                job.ended(0 if error else checksum(job.into), error)
            if error is not None and failed is None:
                failed = error
                self._down(error)
        if self._link is not None:
            self._link.close()

    def _attempt(self, job: SendJob | RecvJob) -> TransferError | None:
        assert self._link is not None
        try:
            if isinstance(job, SendJob):
                job.fence.wait()
                if job.fence.withheld():
                    return None
                void = job.fence.void()
                if void:
                    job.data.zero_()
                job.starting(checksum(job.data) ^ void)
                self._link.send(job.data)
            else:
                self._link.recv(job.into)
        except TransferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a job that never ended would hold its bytes for ever
            return TransferError(TransferCause.LINK_DOWN, str(error).split("\n", 1)[0])
        return None
