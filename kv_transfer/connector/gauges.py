"""Answers for the engine's gauges, and passes on releases, also while the engine is idle or in a long step.

A thread of the engine process, because vLLM publishes its own figures only with a step.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from kv_transfer.api import desk
from kv_transfer.api.gauges import EngineGauges
from kv_transfer.api.integrity import NOTHING_CHECKED, Coverage, IntegrityCause
from kv_transfer.api.ledger import LedgerSnapshot
from kv_transfer.api.membership import Membership
from kv_transfer.connector.metadata import WorkerAddress
from kv_transfer.integrity.checker import CheckCounts
from kv_transfer.protocol import messages as m

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

log = logging.getLogger(__name__)

WORKER_ANSWER_MS = 1000
Integrity = Callable[[], tuple[Mapping[IntegrityCause, int], CheckCounts, Coverage]]


class GaugeServer:
    """ZeroMQ REP on an ipc endpoint; see `kv_transfer.api.desk`."""

    def __init__(self, endpoint: str, membership: Membership) -> None:
        self._membership = membership
        self._zmq = zmq.Context(1)
        self._gate = membership.gate(self._zmq)
        self._socket = self._zmq.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        membership.server(self._socket)
        self._socket.bind(endpoint)
        self._pool: BlockPool | None = None
        self._counts: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
        self._workers: Sequence[WorkerAddress] = ()
        self._integrity: Integrity | None = None
        self._ledger: Callable[[], LedgerSnapshot] = lambda: LedgerSnapshot(ledger="null")
        self._dealers: list[zmq.Socket[bytes]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="phasegate-gauges", daemon=True)
        self._thread.start()

    def bind_pool(self, pool: "BlockPool") -> None:
        self._pool = pool

    def bind_counts(self, counts: Callable[[], tuple[int, int, int]]) -> None:
        """`counts` returns requests running and waiting, and preemptions so far."""
        self._counts = counts

    def bind_integrity(self, integrity: Integrity) -> None:
        """`integrity` returns mismatches by cause, what was checked, and what is."""
        self._integrity = integrity

    def bind_ledger(self, ledger: Callable[[], LedgerSnapshot]) -> None:
        """`ledger` is called in this server's thread."""
        self._ledger = ledger

    def bind_workers(self, workers: Sequence[WorkerAddress]) -> None:
        self._workers = workers

    def close(self) -> None:
        self._stopping = True
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._stopping:
            if self._socket.poll(100):
                self._socket.send(self._answer(self._socket.recv()))
        for dealer in self._dealers:
            dealer.close()
        self._socket.close()
        self._gate.stop()
        self._zmq.term()

    def _answer(self, data: bytes) -> bytes:
        try:
            question = desk.decode(data)
        except (RecursionError, msgspec.DecodeError):
            log.warning("malformed question ignored")
            return b""
        if isinstance(question, desk.AskGauges):
            return msgspec.msgpack.encode(self._snapshot())
        if isinstance(question, desk.AskLedger):
            return msgspec.msgpack.encode(self._ledger())
        self._tell_workers(m.Release(transfer_id=question.transfer_id))
        return b""

    def _snapshot(self) -> EngineGauges:
        running, waiting, preemptions = self._counts()
        counts = self._ask_workers()
        mismatches, checks, coverage = (
            self._integrity() if self._integrity else ({}, CheckCounts(), NOTHING_CHECKED)
        )
        pool, workers = self._pool, self._workers
        return EngineGauges(
            free_pages=pool.get_num_free_blocks() if pool is not None else 0,
            # One page is vLLM's null page, which is never handed out.
            total_pages=pool.num_gpu_blocks - 1 if pool is not None else 0,
            running=running,
            waiting=waiting,
            preemptions=preemptions,
            # All ranks take part in every transfer: the largest number is the number.
            in_flight_transfers=max((count.in_flight for count in counts), default=0),
            control_addresses=tuple(worker.control for worker in workers),
            page_bytes=sum(worker.page_bytes for worker in workers),
            block_size=workers[0].block_size if workers else 0,
            malformed_messages=sum(count.malformed for count in counts),
            strangers_refused=sum(count.strangers for count in counts),
            mismatches={cause.value: mismatches[cause] for cause in list(mismatches)},
            steps_checked=checks.steps,
            steps_unchecked=checks.unchecked,
            pages_checked=checks.pages,
            check_seconds=checks.seconds,
            coverage=coverage,
        )

    def _ask_workers(self) -> list[m.Count]:
        """What each rank that answers has counted."""
        self._tell_workers(m.CountRequest())
        counts: list[m.Count] = []
        for dealer in self._dealers:
            if not dealer.poll(WORKER_ANSWER_MS):
                log.error("a worker does not answer for its transfers")
                continue
            answer = m.decode_to_receiver(dealer.recv())
            if isinstance(answer, m.Count):
                counts.append(answer)
        return counts

    def _tell_workers(self, message: m.ToSender) -> None:
        while len(self._dealers) < len(self._workers):
            dealer = self._zmq.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            self._membership.client(dealer)
            dealer.connect(self._workers[len(self._dealers)].control)
            self._dealers.append(dealer)
        for dealer in self._dealers:
            while dealer.poll(0):
                dealer.recv()  # late answers to earlier questions
            dealer.send(m.encode(message), zmq.NOBLOCK)
