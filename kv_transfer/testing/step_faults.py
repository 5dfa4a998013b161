"""Decides, beside the scheduler, in which step a page fault is let loose, and spoils what lives there."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from vllm.v1.request import RequestStatus

from kv_transfer.api.faults import FaultConfig, FaultPhase, PageFaultKind, PageFaultOrder
from kv_transfer.api.handoff import Role, Ticket
from kv_transfer.testing import pool_faults as pool
from kv_transfer.testing.armed import Armed, Landed
from kv_transfer.testing.table_faults import IN_TABLES, TableFault, spoil_pages

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from kv_transfer.connector.metadata import StepOrders

Kind = PageFaultKind
_AT_LOOK_UP: Final = (Kind.STALE_PREFIX, Kind.FOREIGN_DOMAIN)
_AT_ALLOCATION: Final = (Kind.DOUBLE_IN_STEP, Kind.DOUBLE_ACROSS)
_IN_TRANSFER: Final = (FaultPhase.SEND, FaultPhase.RECEIVE)
_WAITING: Final = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class StepFaults(Protocol):
    active: bool
    """Whether steps may be spoiled: the worker's side has to come before the forward then."""

    def before(self, scheduler: "Scheduler") -> None:
        """The next step is about to be scheduled."""

    def in_step(self, scheduler: "Scheduler", output: "SchedulerOutput") -> tuple[TableFault, ...]:
        """The step is scheduled, and nobody has looked at it. Returns what is to go wrong in its tables."""

    def told(self, scheduler: "Scheduler", orders: "StepOrders") -> None:
        """What the worker is told of transfers is complete."""


class NoStepFaults:
    active = False

    def before(self, scheduler: "Scheduler") -> None:
        return

    def in_step(self, scheduler: "Scheduler", output: "SchedulerOutput") -> tuple[TableFault, ...]:
        return ()

    def told(self, scheduler: "Scheduler", orders: "StepOrders") -> None:
        return


def step_faults(config: FaultConfig) -> StepFaults:
    """Those armed in the configured folder; none without one."""
    return NoStepFaults() if config.page_faults is None else ArmedStepFaults(Armed(Path(config.page_faults)))


class ArmedStepFaults:
    active = True

    def __init__(self, armed: Armed) -> None:
        self._armed = armed
        self._orders: dict[str, PageFaultOrder] = {}
        self._scheduler: Any = None
        self._new: dict[str, KVCacheBlock] = {}
        """The last new page of each request in the step that is being scheduled."""

    def before(self, scheduler: "Scheduler") -> None:
        if self._scheduler is None:
            self._scheduler = scheduler
            pool.Allocations(scheduler, self._instead)
        self._orders = self._armed.orders()
        self._new.clear()
        for name, order in self._of(*_AT_LOOK_UP):
            victim, other = self._find(order.victim), self._find(order.other)
            if victim is None or other is None or victim.status not in _WAITING or not self._pages(other):
                continue
            page = self._pages(other)[0]
            if self._phase_waiting(victim) is not order.phase:
                continue
            if order.kind is Kind.STALE_PREFIX:
                pool.mislead_to(scheduler.kv_cache_manager.block_pool, victim, page)
            else:
                pool.hash_as(victim, other)
            self._landed(name, victim, other, instead=page)

    def _instead(self, request: "Request", got: "KVCacheBlock") -> "KVCacheBlock | None":
        """A page to be given to the request in the place of a new one."""
        earlier = dict(self._new)
        self._new[request.request_id] = got
        for name, order in self._of(*_AT_ALLOCATION):
            victim, other = self._find(order.victim), self._find(order.other)
            if victim is None or other is None or request not in (victim, other):
                continue
            if victim.num_computed_tokens < order.after_tokens or self._phase_now(victim) is not order.phase:
                continue
            page = None
            if order.kind is Kind.DOUBLE_IN_STEP:
                page = earlier.get(other.request_id if request is victim else victim.request_id)
            elif request is other and self._pages(victim):
                page = self._scheduler.kv_cache_manager.block_pool.blocks[self._pages(victim)[-1]]
            if page is not None:
                self._landed(name, victim, other, page=page.block_id, instead=got.block_id)
                return page
        return None

    def in_step(self, scheduler: "Scheduler", output: "SchedulerOutput") -> tuple[TableFault, ...]:
        faults = []
        for name, order in self._of(*(k for k in Kind if k not in (*_AT_LOOK_UP, *_AT_ALLOCATION))):
            victim, other = self._find(order.victim), self._find(order.other)
            if victim is None or other is None or not self._pages(victim) or not self._pages(other):
                continue
            if not self._is_time(order, victim, output):
                continue
            pages, instead = self._pages(victim), self._pages(other)[0]
            match order.kind:
                case kind if kind in IN_TABLES and order.phase not in _IN_TRANSFER:
                    faults.append(TableFault(order.kind, victim.request_id, instead, order.rank))
                case Kind.FREE_LIVE:
                    pool.free_live(scheduler.kv_cache_manager.block_pool, pages[-1:])
                case Kind.STALE_TAG:
                    pool.free_live(scheduler.kv_cache_manager.block_pool, pages)
                case Kind.ZERO_TARGET:
                    pool.clear(output, pages[0])
                case Kind.COPY_SOURCE:
                    pool.copy_over(output, instead, pages[0])
                case _:
                    continue
            self._landed(name, victim, other, page=pages[-1], instead=instead)
        return tuple(faults)

    def told(self, scheduler: "Scheduler", orders: "StepOrders") -> None:
        for name, order in self._of(*IN_TABLES, Kind.STALE_EPOCH, Kind.CORRUPT_PAYLOAD):
            victim, other = self._find(order.victim), self._find(order.other)
            if victim is None or other is None or not self._pages(other):
                continue
            instead = self._pages(other)[0]
            if order.phase is FaultPhase.SEND:
                spoiled = self._spoil_send(order, victim, instead, orders)
            else:
                spoiled = order.phase is FaultPhase.RECEIVE and self._spoil_receive(
                    order, victim, instead, orders
                )
            if spoiled:
                self._landed(name, victim, other, instead=instead)

    def _spoil_send(
        self, order: PageFaultOrder, victim: "Request", instead: int, orders: "StepOrders"
    ) -> bool:
        if order.kind is Kind.STALE_EPOCH:
            ticket = Ticket.from_params(victim.kv_transfer_params)
            if ticket is None or ticket not in orders.announces:
                return False
            orders.announces[orders.announces.index(ticket)] = _of_earlier_engine(ticket)
            return True
        for place, told in enumerate(orders.progress):
            if told.request_id == victim.request_id and told.computed_tokens >= told.prompt_tokens:
                orders.progress[place] = replace(told, page_ids=_wrong(order, told.page_ids, instead))
                return True
        return False

    def _spoil_receive(
        self, order: PageFaultOrder, victim: "Request", instead: int, orders: "StepOrders"
    ) -> bool:
        for place, told in enumerate(orders.receives):
            if told.request_id != victim.request_id:
                continue
            if order.kind is Kind.CORRUPT_PAYLOAD:
                fault = TableFault(order.kind, victim.request_id, instead, order.rank)
                orders.spoiled = (*orders.spoiled, fault)
            elif order.kind is Kind.STALE_EPOCH:
                orders.receives[place] = replace(told, ticket=_of_earlier_engine(told.ticket))
            else:
                orders.receives[place] = replace(told, page_ids=_wrong(order, told.page_ids, instead))
            return True
        return False

    # -- who, and when

    def _of(self, *kinds: Kind) -> list[tuple[str, PageFaultOrder]]:
        return [(name, order) for name, order in self._orders.items() if order.kind in kinds]

    def _landed(
        self, name: str, victim: "Request", other: "Request", *, page: int = -1, instead: int = -1
    ) -> None:
        del self._orders[name]
        what = Landed(victim=victim.request_id, other=other.request_id, page=page, instead=instead)
        self._armed.landed(name, what)

    def _find(self, prefix: str) -> "Request | None":
        found = (r for request_id, r in self._scheduler.requests.items() if request_id.startswith(prefix))
        return next(found, None)

    def _pages(self, request: "Request") -> list[int]:
        return pool.pages_of(self._scheduler, request)

    def _is_time(self, order: PageFaultOrder, victim: "Request", output: "SchedulerOutput") -> bool:
        computed = int(victim.num_computed_tokens)  # moves on when the step is sent
        if computed < order.after_tokens:
            return False
        if order.phase in _IN_TRANSFER:
            return self._phase_now(victim) is order.phase
        scheduled = output.num_scheduled_tokens.get(victim.request_id, 0)
        new = victim.request_id in {new.req_id for new in output.scheduled_new_reqs}
        whole = new and computed + scheduled >= victim.num_prompt_tokens
        phase = self._phase_now(victim)
        if phase in (FaultPhase.PREFILL, FaultPhase.CHUNK):
            phase = FaultPhase.PREFILL if whole else FaultPhase.CHUNK
        return scheduled > 0 and phase is order.phase

    def _phase_now(self, request: "Request") -> FaultPhase:
        """While a step is being scheduled."""
        ticket = Ticket.from_params(request.kv_transfer_params)
        if request.is_finished():
            return FaultPhase.SEND
        if request.num_preemptions:
            return FaultPhase.RESUMED
        if request.num_computed_tokens >= request.num_prompt_tokens:
            return FaultPhase.DECODE
        if ticket is not None and ticket.role is Role.RECEIVE and request.status in _COMING:
            return FaultPhase.RECEIVE
        return FaultPhase.CHUNK if request.num_computed_tokens else FaultPhase.PREFILL

    def _phase_waiting(self, request: "Request") -> FaultPhase:
        """Of one that is about to look for its prefix."""
        ticket = Ticket.from_params(request.kv_transfer_params)
        if ticket is not None:
            return FaultPhase.SEND if ticket.role is Role.SEND else FaultPhase.RECEIVE
        if request.num_preemptions:
            return FaultPhase.RESUMED
        whole = request.num_tokens <= self._scheduler.max_num_scheduled_tokens
        return FaultPhase.PREFILL if whole else FaultPhase.CHUNK


def _wrong(order: PageFaultOrder, pages: tuple[int, ...], instead: int) -> tuple[int, ...]:
    return tuple(spoil_pages(order.kind, pages, len(pages), instead))


def _of_earlier_engine(ticket: Ticket) -> Ticket:
    return replace(ticket, peer_engine="0" * len(ticket.peer_engine))


_COMING: Final = (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KVS)
