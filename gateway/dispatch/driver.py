"""Executes the flow of one request: makes its calls, feeds it news, hands its tokens on."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

from gateway.dispatch import flow
from gateway.dispatch.bus_receiver import BusReceiver
from gateway.dispatch.fleet import Fleet
from gateway.dispatch.inbox import Inbox
from gateway.dispatch.placement import Placement
from gateway.dispatch.pools import EnginePool, as_value
from gateway.dispatch.summary import RequestSummary, Summaries, rate
from gateway.drain import Drain
from gateway.errors import (
    DRAIN_RETRY_AFTER_S,
    RETRY_AFTER_S,
    ApiError,
    EnginesUnavailable,
    ShuttingDown,
    StreamIncomplete,
    for_fault,
)
from gateway.metrics import Alone, GatewayMetrics, Stage
from gateway.routing.snapshot import Ask
from gateway.telemetry import RequestTrace
from kv_transfer.api import HandoffReport
from workers.api import (
    DecodeRequest,
    DecodeResult,
    FaultKind,
    FinishReason,
    Item,
    Phase,
    PrefillRequest,
    PrefillResult,
    Sampling,
    WorkerFault,
)

log = logging.getLogger(__name__)

SETTLE_S: Final = 0.25
"""Seconds that bus frames may lag behind the control call before tokens are asked for again."""
PATIENCE_S: Final = 5.0
"""Seconds that a refetch or a release may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A rendered request. Its fields are validated."""

    request_id: str
    label: str
    """What the client calls the request. Unique to nobody."""
    token_ids: tuple[int, ...]
    cache_salt: str
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    trace: RequestTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every call needs; one of each per gateway."""

    pool: EnginePool
    fleet: Fleet
    placement: Placement
    bus: BusReceiver
    gateway_id: str
    block_size: int
    request_timeout_s: float
    summaries: Summaries
    metrics: GatewayMetrics
    drain: Drain = field(default_factory=Drain)
    settle_s: float = SETTLE_S
    patience_s: float = PATIENCE_S
    now: Callable[[], float] = time.monotonic
    _aside: set[asyncio.Task[None]] = field(default_factory=set, repr=False)

    def aside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this to its end, whoever else goes on or is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)
        return task


class Call:
    """One request in the engines. Use as an async context manager: leaving it early cancels both calls.

    `take` its tokens until the answer is complete.
    """

    def __init__(self, services: Services, job: Job) -> None:
        self._s = services
        self._job = job
        self._trace = job.trace
        self._traceparent = job.trace.traceparent
        self._transfer_id = secrets.token_hex(16)
        self._events: Inbox[flow.Event] = Inbox()
        self._tasks: dict[Phase, asyncio.Task[None]] = {}
        self._refetch: asyncio.Task[None] | None = None
        self._refetches = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._leaving = ExitStack()
        self._state = flow.State()
        self._fresh: tuple[int, ...] = ()
        """Accepted tokens that nobody has taken."""
        self._last: flow.Finish | flow.Fail | flow.Abandon | None = None
        self._prefill_replica: str | None = None
        self._decode_replica = ""
        self._prefilled: PrefillResult | None = None
        self._handoff: HandoffReport | None = None
        """As told with the first token: decode's own account may never come."""
        self._started = services.now()
        self._first_at: float | None = None
        self._status = "client_gone"
        self.result: DecodeResult | None = None
        """Decode's own account; None when a stop string ended the answer first."""
        self.billed_tokens = 0
        """Output tokens that count: up to the one that completed a stop string."""

    async def __aenter__(self) -> Self:
        """Choose replicas and make the calls.

        Raises:
            EnginesUnavailable: no decode replica can take the request. Nothing was called.
        """
        self._trace.enter(Stage.ROUTE)
        pages = -(-len(self._job.token_ids) // self._s.block_size)
        ask, choose = Ask(request_id=self._job.request_id, pages=pages), self._s.placement.choose
        decode_replica = choose(Phase.DECODE, ask)
        if decode_replica is None:
            log.warning("request.unplaced request_id=%s phase=%s", self._job.request_id, Phase.DECODE)
            raise EnginesUnavailable(retry_after_s=RETRY_AFTER_S)
        self._decode_replica = decode_replica
        if len(self._job.token_ids) > 1:  # decode computes the last prompt token itself
            self._prefill_replica = choose(Phase.PREFILL, ask)
            if self._prefill_replica is None:
                self._alone(Alone.NO_PREFILL)
        self._after(self._s.request_timeout_s, flow.DeadlinePassed())
        self._leaving.enter_context(self._s.drain.inside(lambda: self._tell(flow.GatewayLeaves())))
        self._s.bus.subscribe(self._job.request_id, self._on_item)
        enter, own_id = self._s.fleet.enter, self._job.request_id
        if self._prefill_replica:
            enter(self._prefill_replica, own_id, lambda: self._tell(flow.PrefillLost()))
        enter(decode_replica, own_id, lambda: self._tell(flow.DecodeLost()), pages=pages)
        self._state, actions = flow.start(with_prefill=self._prefill_replica is not None)
        self._trace.note(prefill_replica=self._prefill_replica, decode_replica=self._decode_replica)
        self._trace.enter(Stage.FIRST_TOKEN)
        self._perform(actions)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._advance(flow.ClientGone())
        self._leaving.close()
        for timer in self._timers:
            timer.cancel()
        if self._refetch is not None:
            self._refetch.cancel()
        self._s.bus.unsubscribe(self._job.request_id)
        if self._prefill_replica:
            self._s.fleet.leave(self._prefill_replica, self._job.request_id)
        self._s.fleet.leave(self._decode_replica, self._job.request_id)
        self._s.summaries.add(self._summary())
        running = [task for task in (*self._tasks.values(), self._refetch) if task is not None]
        if self._first_at is None and not self._state.attempt:
            # Decode may never have asked for the pages: then nobody but us knows that nobody will.
            running.append(self._s.aside(self._release()))
        if running:
            # They were cancelled or have returned; waiting makes this call their owner to the end.
            await asyncio.wait(running, timeout=1.0)

    async def take(self) -> tuple[int, ...]:
        """Accepted output tokens, in order: all that came since the last time. Waits while that is nothing.

        Empty when the answer is complete. Raises the `ApiError` that ended the request.
        """
        while not self._fresh and self._last is None:
            for event in await self._events.take():
                self._advance(event)
        if self._fresh:
            fresh, self._fresh = self._fresh, ()
            if self._first_at is None:
                self._first_at = self._s.now()
                self._s.fleet.began(self._decode_replica, self._job.request_id)
            self._trace.delivered()
            self.billed_tokens += len(fresh)
            return fresh  # the reader may find a stop string and not come back for how decode ended
        match self._last:
            case flow.Finish():
                self.result, self._status = self._last.result, "finished"
                self._trace.complete()
            case flow.Fail():
                error = self._failure(self._last.fault)
                self._status = error.code
                raise error
        return ()

    def stop(self, unused_tokens: int) -> None:
        """A stop string is complete: ends both calls. The last `unused_tokens` came after it, unbilled."""
        self.billed_tokens -= unused_tokens
        self._status = "finished"
        self._trace.complete()
        self._advance(flow.StopFound())

    @property
    def finish_reason(self) -> FinishReason:
        return FinishReason.STOP if self.result is None else self.result.finish_reason

    @property
    def cached_tokens(self) -> int:
        """Prefill's local hit if it ran, else decode's; decode computes the last prompt token anyway."""
        if self._prefilled is not None:
            hit = self._prefilled.cached_tokens
        else:
            hit = self.result.cached_tokens if self.result is not None else 0
        return max(0, min(hit, len(self._job.token_ids) - 1))

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_at is None else self._first_at - self._started

    def _alone(self, why: Alone) -> None:
        log.warning("request.decode_alone request_id=%s why=%s", self._job.request_id, why)
        self._s.metrics.decode_alone(why)

    # News ---------------------------------------------------------------------------------------

    def _tell(self, event: flow.Event) -> None:
        self._events.put(event)

    def _after(self, seconds: float, event: flow.Event) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, self._tell, event))

    def _on_item(self, item: Item) -> None:
        if item.handoff is not None and item.attempt == self._state.attempt:
            self._handoff = item.handoff
        self._tell(flow.Arrived(item.attempt, item.first_index, item.token_ids))

    def _advance(self, event: flow.Event) -> None:
        self._state, actions = flow.step(self._state, event)
        self._perform(actions)

    # Actions ------------------------------------------------------------------------------------

    def _perform(self, actions: tuple[flow.Action, ...]) -> None:
        for action in actions:
            match action:
                case flow.Emit():
                    self._fresh += action.token_ids
                case flow.CallPrefill():
                    self._spawn(Phase.PREFILL, self._run_prefill())
                case flow.CallDecode():
                    if action.attempt:
                        self._alone(Alone.PREFILL_FAILED)
                        self._s.aside(self._release())  # decode will not come for the pages now
                    self._spawn(Phase.DECODE, self._run_decode(action))
                case flow.CancelPrefill():
                    self._tasks[Phase.PREFILL].cancel()
                case flow.CancelDecode():
                    self._tasks[Phase.DECODE].cancel()
                case flow.AwaitSettling():
                    self._after(self._s.settle_s, flow.Settled(action.attempt))
                case flow.Refetch():
                    log.info("request.refetch request_id=%s", self._job.request_id)
                    self._refetches += 1
                    self._s.metrics.bus_gaps.inc()
                    self._refetch = asyncio.create_task(self._run_refetch(action))
                case flow.Finish() | flow.Fail() | flow.Abandon():
                    self._last = action

    def _spawn(self, phase: Phase, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[phase] = asyncio.create_task(work, name=f"{phase}-{self._job.request_id}")

    def _left_s(self) -> float:
        return max(0.001, self._s.request_timeout_s - (self._s.now() - self._started))

    async def _run_prefill(self) -> None:
        assert self._prefill_replica is not None
        request = PrefillRequest(
            request_id=self._job.request_id,
            transfer_id=self._transfer_id,
            decode_engine=self._s.fleet.info(self._decode_replica).engine_id,
            token_ids=self._job.token_ids,
            cache_salt=self._job.cache_salt,
            deadline_s=self._left_s(),
            traceparent=self._traceparent,
        )
        answer = await as_value(self._s.pool.prefill(self._prefill_replica, request))
        if isinstance(answer, WorkerFault):
            self._note_fault(Phase.PREFILL, self._prefill_replica, answer)
            self._tell(flow.PrefillFailed())
        else:
            self._prefilled = answer
            self._tell(flow.PrefillReturned())

    async def _run_decode(self, action: flow.CallDecode) -> None:
        source = self._prefill_replica if action.with_transfer else None
        request = DecodeRequest(
            request_id=self._job.request_id,
            attempt=action.attempt,
            token_ids=self._job.token_ids,
            cache_salt=self._job.cache_salt,
            sampling=self._job.sampling,
            stop_token_ids=self._job.stop_token_ids,
            gateway_id=self._s.gateway_id,
            bus_address=self._s.bus.address,
            deadline_s=self._left_s(),
            transfer_id=self._transfer_id if source else None,
            prefill_engine=self._s.fleet.info(source).engine_id if source else None,
            traceparent=self._traceparent,
        )
        answer = await as_value(self._s.pool.decode(self._decode_replica, request))
        if isinstance(answer, WorkerFault):
            self._note_fault(Phase.DECODE, self._decode_replica, answer)
            self._tell(flow.DecodeFailed(action.attempt, answer.kind))
        else:
            self._tell(flow.DecodeReturned(action.attempt, answer))

    async def _release(self) -> None:
        if (replica_id := self._prefill_replica) is None:
            return
        try:
            async with asyncio.timeout(self._s.patience_s):
                answer = await self._s.pool.release(replica_id, self._transfer_id)
        except TimeoutError:
            answer = WorkerFault(kind=FaultKind.DEADLINE)
        if answer is not None:
            self._note_fault(Phase.PREFILL, replica_id, answer)

    async def _run_refetch(self, action: flow.Refetch) -> None:
        event: flow.Event = flow.RefetchFailed(action.attempt)
        try:
            async with asyncio.timeout(self._s.patience_s):
                answer = await as_value(
                    self._s.pool.refetch(self._decode_replica, self._job.request_id, action.from_index)
                )
            if isinstance(answer, WorkerFault):
                self._note_fault(Phase.DECODE, self._decode_replica, answer)
            else:
                event = flow.Refetched(action.attempt, answer.first_index, answer.token_ids)
        except TimeoutError:
            log.warning("request.refetch.late request_id=%s", self._job.request_id)
        self._tell(event)

    def _note_fault(self, phase: Phase, replica_id: str, fault: WorkerFault) -> None:
        self._s.fleet.note(replica_id, fault)
        self._s.metrics.fault(phase, fault.kind)
        log.warning(
            "request.fault request_id=%s phase=%s fault=%s detail=%s",
            *(self._job.request_id, phase, fault.kind, fault.detail),
        )

    def _failure(self, fault: flow.Fault) -> ApiError:
        log.warning("request.failed request_id=%s fault=%s", self._job.request_id, fault)
        match fault:
            case flow.StreamFault.INCOMPLETE:
                return StreamIncomplete()
            case flow.StreamFault.SHUTTING_DOWN:
                return ShuttingDown(retry_after_s=DRAIN_RETRY_AFTER_S)
            case _:
                return for_fault(fault)

    def _summary(self) -> RequestSummary:
        seconds = self._s.now() - self._started
        handoff = self.result.handoff if self.result is not None else self._handoff
        return RequestSummary(
            request_id=self._job.request_id,
            label=self._job.label,
            trace_id=self._trace.trace_id,
            sampled=self._trace.sampled,
            status=self._status,
            prompt_tokens=len(self._job.token_ids),
            output_tokens=self.billed_tokens,
            cached_tokens=self.cached_tokens,
            attempts=self._state.attempt + 1,
            refetches=self._refetches,
            prefill_replica=self._prefill_replica,
            decode_replica=self._decode_replica,
            handoff=handoff.outcome if handoff is not None else None,
            pages=handoff.pages if handoff is not None else 0,
            wire_bytes=handoff.wire_bytes if handoff is not None else 0,
            ttft_s=self.ttft_s,
            engine_ttft_s=self.result.first_token_s if self.result is not None else None,
            seconds=seconds,
            tokens_per_s=rate(self.billed_tokens, self.ttft_s, seconds),
        )
