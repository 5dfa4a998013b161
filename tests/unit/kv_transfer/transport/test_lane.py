"""The thread of one link: jobs end, whatever the link does."""

import queue
import threading
from collections.abc import Iterator

import pytest
import torch

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.transport.base import Link
from kv_transfer.transport.lane import Fence, Lane, RecvJob, SendJob, checksum
from kv_transfer.transport.loopback import LoopbackLink
from kv_transfer.transport.watchdog import Watchdog

CPU = torch.device("cpu")
Ended = queue.SimpleQueue[TransferError | None]


def no_link_down(error: TransferError) -> None:
    raise AssertionError(error)


def some_bytes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).to(torch.uint8)


def a_send(data: torch.Tensor, ended: Ended) -> SendJob:
    return SendJob(data, Fence(CPU), lambda _: None, ended.put)


@pytest.mark.parametrize(
    "failure",
    [
        RuntimeError("nobody came"),
        OSError("refused"),
        TypeError("port"),
        TransferError(TransferCause.DEADLINE),
    ],
    ids=["torch", "socket", "argument", "link"],
)
def test_a_link_that_cannot_be_built_fails_every_job_and_is_told_once(failure: Exception) -> None:
    """A job that never ended would hold its staging bytes for ever, and in the end stop all transfers."""

    def connect() -> Link:
        raise failure

    downs: Ended = queue.SimpleQueue()
    ended: Ended = queue.SimpleQueue()
    lane = Lane("test", connect, downs.put)
    lane.start()
    for _ in range(3):
        lane.submit(a_send(some_bytes(3), ended))

    errors = [ended.get(timeout=5) for _ in range(3)]

    assert all(error is not None for error in errors)
    assert downs.get(timeout=5) is not None
    assert downs.empty()
    lane.close()


def test_the_receiver_finds_the_checksum_that_the_sender_took() -> None:
    here, there = LoopbackLink.pair()
    data = some_bytes(5000)
    announced: queue.SimpleQueue[int] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[int, TransferError | None]] = queue.SimpleQueue()
    sender, receiver = Lane("s", lambda: there, no_link_down), Lane("r", lambda: here, no_link_down)
    sender.start()
    receiver.start()

    into = torch.empty_like(data)
    receiver.submit(RecvJob(into, lambda number, error: found.put((number, error))))
    sender.submit(SendJob(data, Fence(CPU), announced.put, lambda _: None))

    assert found.get(timeout=5) == (announced.get(timeout=5), None)
    assert torch.equal(into, data)
    assert checksum(data) != checksum(data.flip(0))


def test_closing_a_lane_ends_the_job_that_waits_on_the_wire_and_those_behind_it() -> None:
    here, _ = LoopbackLink.pair(timeout_s=30)
    ended: Ended = queue.SimpleQueue()
    downs: Ended = queue.SimpleQueue()
    started = threading.Event()
    lane = Lane("test", lambda: here, downs.put)
    lane.start()
    lane.submit(SendJob(some_bytes(3), Fence(CPU), lambda _: started.set(), ended.put))
    lane.submit(a_send(some_bytes(3), ended))
    assert started.wait(5)

    lane.close()

    causes = [error.cause for error in (ended.get(timeout=5), ended.get(timeout=5)) if error]
    assert causes == [TransferCause.LINK_DOWN] * 2


def test_the_watchdog_ends_what_outlives_its_deadline_and_nothing_else() -> None:
    watchdog = Watchdog()
    expired, kept = threading.Event(), threading.Event()
    with watchdog.guard(60, kept.set):
        pass
    with watchdog.guard(0.01, expired.set) as guard:
        assert expired.wait(5)

    assert guard.fired
    assert not kept.is_set()
    watchdog.close()


def test_bytes_are_not_looked_at_before_the_engines_work_on_them_is_done() -> None:
    """On CUDA the gather is only queued when a job is submitted: the fence says when it has run."""
    happened: queue.SimpleQueue[str] = queue.SimpleQueue()

    class RecordingFence(Fence):
        def wait(self) -> None:
            happened.put("waited")

    here, there = LoopbackLink.pair()
    lane = Lane("test", lambda: there, no_link_down)
    lane.start()
    lane.submit(
        SendJob(some_bytes(3), RecordingFence(CPU), lambda _: happened.put("checksum"), lambda _: None)
    )
    here.recv(torch.empty(3, dtype=torch.uint8))

    assert [happened.get(timeout=5), happened.get(timeout=5)] == ["waited", "checksum"]
    lane.close()


class Lanes:
    """Both ends of one link, each in a lane of its own."""

    def __init__(self) -> None:
        there, here = LoopbackLink.pair()
        self._sender = Lane("out", lambda: there, no_link_down)
        self._receiver = Lane("in", lambda: here, no_link_down)
        self.said: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Checksums, as the sender announces them."""
        self.heard: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Those of what came."""
        self.ended: Ended = queue.SimpleQueue()
        """How what was sent ended."""
        for lane in (self._sender, self._receiver):
            lane.start()

    def send(self, data: torch.Tensor, fence: Fence) -> None:
        self._sender.submit(SendJob(data, fence, self.said.put, self.ended.put))

    def receive(self, into: torch.Tensor) -> None:
        self._receiver.submit(RecvJob(into, lambda checksum, _: self.heard.put(checksum)))

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes()
    yield lanes
    lanes.close()


class WithheldFence(Fence):
    def withheld(self) -> bool:
        return True


def test_what_is_withheld_is_neither_announced_nor_sent_and_the_link_goes_on(lanes: Lanes) -> None:
    lanes.receive(torch.ones(9, dtype=torch.uint8))
    for count, fence in ((5, WithheldFence(CPU)), (9, Fence(CPU))):
        lanes.send(some_bytes(count), fence)

    assert lanes.heard.get(timeout=5) == checksum(some_bytes(9))
    assert [lanes.ended.get(timeout=5) for _ in range(2)] == [None, None]
    assert lanes.said.get(timeout=5) == checksum(some_bytes(9))
    assert lanes.said.empty()


class VoidFence(Fence):
    def void(self) -> bool:
        return True


def test_what_must_not_be_used_leaves_blank_with_a_wrong_checksum_and_the_link_goes_on(lanes: Lanes) -> None:
    came = [torch.ones(9, dtype=torch.uint8) for _ in range(2)]
    for into in came:
        lanes.receive(into)
    for fence in (VoidFence(CPU), Fence(CPU)):
        lanes.send(some_bytes(9), fence)
    pairs = [(lanes.said.get(timeout=5), lanes.heard.get(timeout=5)) for _ in range(2)]

    assert [lanes.ended.get(timeout=5) for _ in range(2)] == [None, None]
    assert pairs[0][0] != pairs[0][1]
    assert not came[0].any()
    assert pairs[1] == (checksum(some_bytes(9)),) * 2
