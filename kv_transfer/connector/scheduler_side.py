"""The half that lives beside vLLM's scheduler: decides what is fetched, tracks what is held."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kv_transfer.api.handoff import HandoffOutcome, HandoffReport, Role, Ticket
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.gauges import GaugeServer
from kv_transfer.connector.guard import Guard
from kv_transfer.connector.metadata import (
    Held,
    ReceiveOrder,
    SendProgress,
    StepOrders,
    WorkerAddress,
    WorkerNews,
)
from kv_transfer.testing.step_faults import step_faults

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class _Receiving:
    ticket: Ticket
    ordered: bool = False
    """Pages were asked for; the worker will report the end."""
    decided: bool = False
    """Asked for or declined: the ticket is used up, also for a request that is preempted later."""
    report: HandoffReport | None = None


@dataclass(frozen=True, slots=True)
class _Sending:
    ticket: Ticket
    prompt_tokens: int


class SchedulerSide:
    def __init__(self, config: ConnectorConfig, block_size: int, *, tables: bool) -> None:
        """
        Args:
            tables: whether the worker checks each step's tables.
        """
        self._block_size = block_size
        self._receiving: dict[str, _Receiving] = {}
        self._sending: dict[str, _Sending] = {}
        self._orders = StepOrders()
        self._gauges = GaugeServer(config.gauges_endpoint, config.membership())
        self._integrity = config.integrity
        self.guard = Guard()
        self.step_faults = step_faults(config.faults)
        self._gauges.bind_integrity(
            lambda: (self.guard.mismatches(), self.guard.counts, self.guard.coverage(tables=tables))
        )
        self._gauges.bind_ledger(self.guard.snapshot)

    # -- set-up

    def bind_pool(self, pool: "BlockPool") -> None:
        self._gauges.bind_pool(pool)

    def bind_manager(self, manager: "KVCacheManager") -> None:
        if self._integrity:
            self.guard.watch(manager)

    def bind_counts(self, counts: Callable[[], tuple[int, int, int]]) -> None:
        """`counts` returns (running, waiting) of the scheduler."""
        self._gauges.bind_counts(counts)

    def bind_workers(self, addresses: Mapping[int, WorkerAddress]) -> None:
        """By tensor-parallel rank."""
        self._gauges.bind_workers([addresses[rank] for rank in sorted(addresses)])

    def close(self) -> None:
        self._gauges.close()

    # -- requests

    def on_new_request(self, request: "Request") -> None:
        ticket = Ticket.from_params(request.kv_transfer_params)
        if ticket is None:
            return
        if ticket.role is Role.SEND:
            self._sending[request.request_id] = _Sending(ticket, request.num_prompt_tokens)
            self._orders.announces.append(ticket)
        else:
            self._receiving[request.request_id] = _Receiving(ticket)

    def matched_tokens(self, request: "Request", computed_tokens: int) -> tuple[int, bool]:
        """Prompt tokens whose pages can be fetched beyond the local hit, at most all but the last.

        Decode always computes the last prompt token itself: its logits are needed, and the page it
        writes to is then its own.
        """
        receiving = self._receiving.get(request.request_id)
        if receiving is None or receiving.decided:
            return 0, False
        missing = max(0, request.num_prompt_tokens - 1 - computed_tokens)
        return missing, missing > 0

    def after_alloc(self, request: "Request", blocks: "KVCacheBlocks", external_tokens: int) -> None:
        receiving = self._receiving.get(request.request_id)
        if receiving is None or receiving.decided:
            return
        receiving.decided = True
        if external_tokens == 0:
            receiving.report = HandoffReport(outcome=HandoffOutcome.NOTHING_MISSING)
            self._orders.declines.append(receiving.ticket)
            return
        receiving.ordered = True
        wanted = request.num_prompt_tokens - 1
        first_page = (wanted - external_tokens) // self._block_size
        end_page = -(-wanted // self._block_size)
        page_ids = blocks.get_block_ids()[0][first_page:end_page]
        order = ReceiveOrder(
            request.request_id,
            receiving.ticket,
            first_page,
            tuple(page_ids),
            self.guard.expect(request.request_id, page_ids),
        )
        self._orders.receives.append(order)

    def finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """Whether the pages stay allocated until the worker reports the transfer's end, and the report."""
        request_id = request.request_id
        if (sending := self._sending.pop(request_id, None)) is not None:
            transfer_id = sending.ticket.transfer_id
            if request.status in COMPLETE:
                self._orders.held.append(Held(transfer_id, request_id))
                return True, None
            self._orders.dropped.append(transfer_id)
            return False, None
        receiving = self._receiving.pop(request_id, None)
        self.guard.gone(request_id)
        if receiving is None:
            return False, None
        if receiving.report is not None:
            return False, receiving.report.to_params()
        if receiving.ordered:
            # vLLM keeps the pages until the worker reports the receive as finished.
            self._orders.cancels.append(receiving.ticket.transfer_id)
        else:
            self._orders.declines.append(receiving.ticket)
        return False, None

    def report_of(self, request_id: str) -> HandoffReport | None:
        """How the request's pages came, once that is known and until it ends."""
        receiving = self._receiving.get(request_id)
        return None if receiving is None else receiving.report

    # -- steps

    def build_orders(self, output: "SchedulerOutput") -> StepOrders:
        orders, self._orders = self._orders, StepOrders()
        orders.suspended = [
            self._sending[request_id].ticket.transfer_id
            for request_id in output.preempted_req_ids or ()
            if request_id in self._sending
        ]
        if self._sending:
            self._add_progress(orders, output)
        return orders

    def _add_progress(self, orders: StepOrders, output: "SchedulerOutput") -> None:
        before = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        for request_id, computed in before.items():
            sending = self._sending.get(request_id)
            if sending is None:
                continue
            page_ids = state.get_block_ids(request_id) if state is not None else None
            if page_ids is None:
                log.error("no pages known for a scheduled request", extra={"request_id": request_id})
                continue
            orders.progress.append(
                SendProgress(
                    sending.ticket.transfer_id,
                    tuple(page_ids[0]),
                    computed + output.num_scheduled_tokens[request_id],
                    sending.prompt_tokens,
                    request_id,
                    self.guard.ledger.given(request_id, page_ids[0]),
                )
            )

    def on_news(self, news: object) -> None:
        if isinstance(news, WorkerNews):
            for request_id, report in news.reports.items():
                receiving = self._receiving.get(request_id)
                if receiving is not None:
                    receiving.report = report
