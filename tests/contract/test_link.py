"""Every link behaves the same: in one process, and over a torch.distributed group."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.transport.base import Link
from kv_transfer.transport.loopback import LoopbackLink
from kv_transfer.transport.rendezvous import MeetingPoint, join
from kv_transfer.transport.torch_p2p import RECEIVER, SENDER, TorchLink
from kv_transfer.transport.watchdog import Watchdog

Ends = tuple[Link, Link]


def some_bytes(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).to(torch.uint8)


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


class LinkContract(ABC):
    device = torch.device("cpu")

    @abstractmethod
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        """Two connected ends with a time-out of half a second: (receiver, sender)."""

    def test_bytes_arrive_in_the_order_they_were_sent(self, ends: Ends) -> None:
        here, there = ends
        first, second = some_bytes(1000).to(self.device), some_bytes(70_000).to(self.device)
        sending = in_background(lambda: (there.send(first), there.send(second)))

        got = [torch.empty_like(first), torch.empty_like(second)]
        for into in got:
            here.recv(into)
        sending.join(5)

        assert torch.equal(got[0], first)
        assert torch.equal(got[1], second)

    def test_a_send_that_nobody_takes_or_a_receive_that_nobody_feeds_ends_in_time(self, ends: Ends) -> None:
        here, _ = ends

        with pytest.raises(TransferError) as caught:
            here.recv(torch.empty(10, dtype=torch.uint8, device=self.device))

        assert caught.value.cause is TransferCause.DEADLINE

    def test_closing_one_end_fails_the_other_ends_receive(self, ends: Ends) -> None:
        here, there = ends
        failures: list[TransferCause] = []

        def receive() -> None:
            try:
                here.recv(torch.empty(10, dtype=torch.uint8, device=self.device))
            except TransferError as error:
                failures.append(error.cause)

        waiting = in_background(receive)
        there.close()
        waiting.join(5)

        assert failures in ([TransferCause.LINK_DOWN], [TransferCause.DEADLINE])

    def test_a_closed_end_refuses_at_once_and_closing_twice_is_fine(self, ends: Ends) -> None:
        here, _ = ends
        here.close()
        here.close()

        with pytest.raises(TransferError) as caught:
            here.send(some_bytes(3).to(self.device))

        assert caught.value.cause is TransferCause.LINK_DOWN


class TestLoopback(LinkContract):
    @pytest.fixture
    def ends(self) -> Ends:
        return LoopbackLink.pair(timeout_s=0.5)


def connect(backend: str, device: torch.device, watchdog: Watchdog, timeout_s: float) -> Ends:
    meeting = MeetingPoint.open("127.0.0.1")

    def end(rank: int) -> TorchLink:
        store = meeting.serve(5) if rank == RECEIVER else join("127.0.0.1", meeting.port, 5)
        return TorchLink(
            store=store,
            link_id="test",
            rank=rank,
            host="127.0.0.1",
            backend=backend,
            device=device,
            timeout_s=timeout_s,
            watchdog=watchdog,
        )

    with ThreadPoolExecutor(2) as pool:
        receiver, sender = pool.map(end, (RECEIVER, SENDER))
    return receiver, sender


class TestGloo(LinkContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        watchdog = Watchdog()
        ends = connect("gloo", self.device, watchdog, 0.5)
        yield ends
        for end in ends:
            end.close()
        watchdog.close()


@pytest.mark.gpu
class TestNccl(LinkContract):
    """Both ranks on one device are refused by NCCL: this needs two GPUs."""

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        if torch.cuda.device_count() < 2:
            pytest.skip(f"needs two NVIDIA GPUs, found {torch.cuda.device_count()}")
        self.device = torch.device("cuda")
        watchdog = Watchdog()
        ends = connect("nccl", self.device, watchdog, 0.5)
        yield ends
        for end in ends:
            end.close()
        watchdog.close()
