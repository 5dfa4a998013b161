"""The half that lives beside the model: gathers pages after a forward, copies received pages in.

Everything here runs on the engine thread, at step boundaries, so that nothing reads a page while a
kernel writes it, or the reverse.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.handoff import HandoffOutcome, HandoffReport
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.api.log_fields import traced
from kv_transfer.api.page import Layout, Scales, WireFormat
from kv_transfer.codec import CODECS, CONVERSIONS, Conversion, Encoded, NonfiniteSource
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.courier import Courier
from kv_transfer.connector.judged import Flaws, JudgedFence
from kv_transfer.connector.layout import read_layout
from kv_transfer.connector.metadata import SendProgress, StepOrders, WorkerAddress, WorkerNews
from kv_transfer.connector.receiver import Outcome
from kv_transfer.connector.sender import Want
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.integrity.device import NO_VERDICTS, Verdicts
from kv_transfer.integrity.tags import NO_TAG
from kv_transfer.testing.faults import Faults
from kv_transfer.testing.table_faults import TableFaults

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext

log = logging.getLogger(__name__)

GROUP_BYTES = 8 * 2**20
"""Pages leave in groups of at most this size, so that the wire works while the next group is gathered."""
IDLE_WAIT_S = 0.002
"""An engine with nothing to compute polls for pages; this long it sleeps between looks, unless woken."""


class CourierDied(RuntimeError):
    """The engine must not go on: transfers would hang until their deadlines. Its replica restarts."""


@dataclass
class _Table:
    """Pages of one request that is being prefilled, or is held."""

    page_ids: tuple[int, ...]
    computed_tokens: int
    prompt_tokens: int
    request_id: str = ""
    tags: tuple[int, ...] = ()
    """Of the pages, when the request was given them; none without a ledger."""
    verdicts: Verdicts = NO_VERDICTS
    """Of the step that wrote to the pages last, and of those under way with it, where they come later."""
    leans: frozenset[str] = frozenset()
    """Requests whose pages this one found."""
    shipped_pages: int = 0
    """Of the wanted pages, how many have left."""
    flaws: Flaws | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    sending: set[str]
    receiving: set[str]
    failed: set[str]


class WorkerSide:
    def __init__(
        self,
        config: ConnectorConfig,
        rank: int,
        check: StepCheck,
        *,
        now: Callable[[], float] = time.monotonic,
        conversions: Mapping[tuple[WireFormat, WireFormat], Conversion] = CONVERSIONS,
    ) -> None:
        self._config, self._rank, self._now = config, rank, now
        self._conversions = conversions
        self._flawed: deque[tuple[str, NonfiniteSource]] = deque()
        """Transfers that lanes have given up."""
        self.check = check
        self._flagged: set[str] = set()
        """In the step that is being computed: what it writes is not shipped."""
        self._faults = Faults(config.faults)
        self._table_faults = TableFaults(rank)
        self._tables: dict[str, _Table] = {}
        self._live: set[str] = set()
        """Announced transfers whose request still owns, or holds, its pages."""
        self._held: dict[str, str] = {}
        self._closed: set[str] = set()
        """Live transfers that are over: their pages go free when the request ends."""
        self._open_receives: dict[str, str] = {}
        self._reports: dict[str, HandoffReport] = {}
        self._caches: list[torch.Tensor] = []
        self._layout: Layout | None = None
        self._courier: Courier | None = None

    # -- set-up

    def register(
        self,
        caches: Mapping[str, torch.Tensor],
        isa: str,
        *,
        cache_dtype: str = "auto",
        scales: Scales = (),
    ) -> None:
        """
        Args:
            isa: as `read_layout` takes it, and `cache_dtype`.
            scales: with which this engine's kernels read its cache.

        Raises:
            UnsupportedCache: this engine's cache cannot be shipped.
        """
        self._layout = read_layout(caches, isa=isa, cache_dtype=cache_dtype)
        self._codec = CODECS[self._layout.format]
        self._caches = list(caches.values())
        device = self._caches[0].device
        self._courier = Courier(
            self._config,
            rank=self._rank,
            layout=self._layout,
            scales=scales,
            device=device,
            through=self._faults.link,
        )

    def bind_runner(self, runner: Any) -> None:
        self.check.bind_runner(runner)
        self._table_faults.bind_runner(runner)

    def address(self) -> WorkerAddress:
        assert self._layout is not None
        return WorkerAddress(self._running().address, self._layout.page_bytes, self._layout.block_size)

    def close(self) -> None:
        if self._courier is not None:
            self._courier.close()
            self._courier = None

    # -- steps

    def begin_step(self, orders: StepOrders) -> None:
        """Pass on what the scheduler side decided. Queues work; waits for nobody."""
        courier = self._running()
        self._faults.told(orders.spoiled)
        for ticket in orders.announces:
            self._live.add(ticket.transfer_id)
            courier.later(partial(courier.sender.announce, ticket))
        for transfer_id in orders.suspended:
            if (table := self._tables.get(transfer_id)) is not None:
                # What has left stays with its receiver, who waits for what follows it.
                table.page_ids, table.computed_tokens = (), 0
        for transfer_id in orders.dropped:
            self._forget(transfer_id)
            courier.later(partial(courier.sender.gone, transfer_id))
        for held in orders.held:
            self._held[held.transfer_id] = held.request_id
        for order in orders.receives:
            self._open_receives[order.request_id] = order.ticket.transfer_id
            courier.later(partial(courier.receiver.begin, order))
        for transfer_id in orders.cancels:
            courier.later(partial(courier.receiver.cancel, transfer_id))
        for ticket in orders.declines:
            courier.later(partial(courier.receiver.decline, ticket))

    def check_step(self, orders: StepOrders, context: "ForwardContext") -> None:
        """Before the forward: rows that are not as ordered write nothing, and their requests end."""
        if orders.spoiled:
            self._table_faults.spoil(orders.spoiled, self.check.tables(context))
        self._flagged = self.check.before_forward(orders.check, context)

    def after_forward(self, orders: StepOrders) -> None:
        """Note how far pages are written, and ship those that are complete and asked for."""
        leans = {} if orders.check is None else orders.check.leans
        for progress in orders.progress:
            found_of = leans.get(progress.request_id, set())
            if self._flagged.isdisjoint({progress.request_id, *found_of}):
                self._note(progress, found_of)
        courier = self._running()
        for transfer_id, want in courier.sender.wanted().items():
            table = self._tables.get(transfer_id)
            if table is not None:
                self._ship_ready(courier, transfer_id, table, want)

    def finish_step(self, *, idle: bool) -> Finished:
        """Copy in what has arrived; what ended since the last step. An idle engine naps here briefly."""
        courier = self._running()
        if idle and not (courier.receiver.news.is_set() or courier.sender.news.is_set()):
            courier.receiver.news.wait(IDLE_WAIT_S)
        finished = Finished(set(), set(), set())
        self._give_up_flawed()
        for outcome in self._faults.due(courier.receiver.take()):
            self._finish_receive(courier, outcome, finished)
        for _ in range(courier.sender.take_stale_offers()):
            self.check.refuse(IntegrityCause.STALE_TRANSFER)
        self._closed.update(self._live.intersection(courier.sender.take_closed()))
        for transfer_id in self._closed & self._held.keys():
            finished.sending.add(self._held.pop(transfer_id))
            self._forget(transfer_id)
        return finished

    def take_news(self) -> WorkerNews:
        reports, self._reports = self._reports, {}
        faults, refused = self.check.take()
        return WorkerNews(reports, faults, self.check.take_verdict(), refused, self.check.counts)

    def _running(self) -> Courier:
        courier = self._courier
        if courier is None:
            raise CourierDied("the transfer thread was closed")
        if courier.failure is not None:
            raise CourierDied("the transfer thread died") from courier.failure
        return courier

    def _forget(self, transfer_id: str) -> None:
        self._tables.pop(transfer_id, None)
        self._closed.discard(transfer_id)
        self._live.discard(transfer_id)

    def _note(self, progress: SendProgress, leans: Set[str]) -> None:
        table = self._tables.get(progress.transfer_id)
        if table is None:
            table = self._tables[progress.transfer_id] = _Table(
                progress.page_ids,
                progress.computed_tokens,
                progress.prompt_tokens,
                progress.request_id,
                progress.tags,
            )
        else:
            table.page_ids, table.tags = progress.page_ids, progress.tags
            table.computed_tokens = progress.computed_tokens
        table.verdicts = self.check.verdict()
        table.leans |= leans

    def _ship_ready(self, courier: Courier, transfer_id: str, table: _Table, want: Want) -> None:
        assert self._layout is not None
        first_page, wanted = want.first_page, want.pages
        size = self._layout.block_size
        # A page is complete after its last slot is written; the prompt's last page, when the prompt is.
        whole = table.computed_tokens >= table.prompt_tokens
        complete = len(table.page_ids) if whole else table.computed_tokens // size
        group = max(1, GROUP_BYTES // want.layout.page_bytes)
        while (start := first_page + table.shipped_pages) < min(complete, first_page + wanted):
            if self._faults.keeps_pages(transfer_id):
                return
            end = min(start + group, complete, first_page + wanted)
            lost = self.check.lost(table.page_ids[start:end], table.tags[start:end])
            if lost is not None:
                self._give_up_stale(courier, transfer_id, table, lost)
                return
            page_ids = self._faults.pages(transfer_id, table.page_ids[start:end])
            try:
                encoded = self._encoded(page_ids, want)
            except NonfiniteSource as bad:
                # What it was converted to would be a number that nobody computed: decode's request ends.
                self._flawed_at(courier, transfer_id, bad)
                self._give_up_flawed()
                return
            table.shipped_pages += end - start
            table.flaws = table.flaws or Flaws(partial(self._flawed_at, courier, transfer_id))
            judged = JudgedFence(encoded, table.flaws, table.verdicts, table.leans | {table.request_id})
            fence = self._faults.fence(transfer_id, judged)
            courier.sender.ship(transfer_id, start, end - start, encoded.wire, fence)

    def _encoded(self, page_ids: Sequence[int], want: Want) -> Encoded:
        """Raises NonfiniteSource, where it is known at once."""
        layout = self._layout
        assert layout is not None
        if want.layout.format == layout.format:
            return Encoded(self._codec.encode(self._caches, page_ids))
        conversion = self._conversions[layout.format, want.layout.format]
        return conversion.encode(self._caches, page_ids, want.scales, by_slot=layout.by_slot)

    def _flawed_at(self, courier: Courier, transfer_id: str, bad: NonfiniteSource) -> None:
        """From any thread."""
        courier.later(partial(courier.sender.nonfinite, transfer_id))
        self._flawed.append((transfer_id, bad))

    def _give_up_flawed(self) -> None:
        while self._flawed:
            transfer_id, bad = self._flawed.popleft()
            facts = {"page": bad.page, "layer": bad.layer}
            table = self._tables.get(transfer_id) or _Table((), 0, 0)
            self._give_up(transfer_id, table, IntegrityCause.NONFINITE_SOURCE, facts)

    def _give_up_stale(self, courier: Courier, transfer_id: str, table: _Table, lost: PageFault) -> None:
        """What lies in the pages now is another's: it is not read. Decode computes its prompt itself."""
        self._give_up(transfer_id, table, lost.cause, {"page": lost.page})
        courier.later(partial(courier.sender.stale, transfer_id))

    def _give_up(
        self, transfer_id: str, table: _Table, cause: IntegrityCause, facts: Mapping[str, object]
    ) -> None:
        log.error(
            "pages are not shipped",
            extra={"transfer": transfer_id, "request_id": table.request_id, "cause": cause, **facts},
        )
        table.page_ids = ()
        self.check.refuse(cause)

    def _fault_of(self, outcome: Outcome) -> PageFault | None:
        """Why the request must end, if it must."""
        if outcome.cause is TransferCause.NONFINITE_SOURCE and self._config.integrity:
            # Computed here the same would be written into a cache that cannot say so.
            return PageFault(IntegrityCause.NONFINITE_SOURCE, -1, NO_TAG, NO_TAG)
        return self.check.lost(outcome.order.page_ids, outcome.order.tags) if outcome.groups else None

    def _finish_receive(self, courier: Courier, outcome: Outcome, finished: Finished) -> None:
        order = outcome.order
        transfer_id = order.ticket.transfer_id
        mine = self._open_receives.get(order.request_id) == transfer_id
        cause = outcome.cause
        fault = self._fault_of(outcome) if mine else None
        if fault is not None:
            self.check.fault(order.request_id, fault)
        elif outcome.groups and mine:
            for group in outcome.groups:
                pages = order.page_ids[group.offset : group.offset + group.pages]
                self._codec.decode(group.data, self._caches, pages)
        elif cause is TransferCause.CHECKSUM:
            self.check.refuse(IntegrityCause.PAYLOAD_CHECKSUM)
        if cause is None:
            courier.later(partial(courier.receiver.copied, transfer_id))
        if not mine:
            return
        del self._open_receives[order.request_id]
        finished.receiving.add(order.request_id)
        if cause is not None:
            if fault is None:
                finished.failed.add(order.request_id)
            if cause is not TransferCause.CANCELLED:
                log.warning(
                    "transfer failed",
                    extra={
                        "request_id": order.request_id,
                        "cause": cause,
                        "detail": outcome.detail,
                        **traced(order.ticket.traceparent),
                    },
                )
        self._reports[order.request_id] = HandoffReport(
            outcome=HandoffOutcome.SHIPPED if cause is None else HandoffOutcome.RECOMPUTED,
            pages=len(order.page_ids) if cause is None else 0,
            wire_bytes=sum(group.data.numel() for group in outcome.groups),
            seconds=self._now() - outcome.started_at,
            started_at=outcome.started_at,
            cause=cause,
            detail=outcome.detail,
        )
