"""What an engine replica adds to a request's trace: its own work, and the transfer under it.

Nothing here holds text, tokens, keys or transfer ids: attributes are figures, words of ours and engine ids.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    NoOpTracer,
    Span,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kv_transfer.api import HandoffOutcome, HandoffReport, PageFault, StartReport, request_fields
from workers.api import FaultKind
from workers.metrics import ReplicaMetrics

Value = str | int | float | bool

_W3C: Final = TraceContextTextMapPropagator()
_HEADER: Final = "traceparent"


class Work:
    """One call: its span and its part in the metrics. Costs next to nothing when it is not sampled."""

    def __init__(self, telemetry: "Telemetry", span: Span, traceparent: str) -> None:
        self._telemetry = telemetry
        self._span = span
        self._transfer_told = False
        self.traceparent = traceparent
        """Context of this work, for what it asks of others; empty when nobody traces."""

    def note(self, **attributes: Value | None) -> None:
        """Facts about the work; None says nothing."""
        if self._span.is_recording():
            self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def page_fault(self, fault: PageFault) -> None:
        """The request ends because a page was not its own. Tags are in hex, as in the log."""
        if self._span.is_recording():
            tags = {"expected": f"{fault.expected:#x}", "found": f"{fault.found:#x}"}
            told = {"cause": fault.cause.value, "page": fault.page, **tags}
            self._span.add_event("page_integrity_fault", _named(told))

    def fail(self, fault: FaultKind) -> None:
        self._telemetry.metrics.fault(fault)
        if self._span.is_recording():
            self._span.set_attribute("phasegate.fault", fault.value)
            self._span.set_status(Status(StatusCode.ERROR, fault.value))

    def begun(self, start: StartReport | None) -> None:
        """The first output is here; None: this engine does not tell when it began."""
        if start is None:
            return
        self._telemetry.metrics.queued(start.queued_s)
        self.note(queued_ms=round(start.queued_s * 1e3, 3))
        self._transfer(start.handoff)

    def ended(self, handoff: HandoffReport | None) -> None:
        """The last output is here."""
        self._transfer(handoff)

    def _transfer(self, report: HandoffReport | None) -> None:
        """The transfer that the engine reports, as a child with the engine's own times. Told once."""
        if report is None or self._transfer_told:
            return
        self._transfer_told = True
        self._telemetry.metrics.transfer(report)
        if self._span.is_recording():
            self._telemetry.transfer_span(self._span, report)


class Telemetry:
    """Spans and metrics of one replica."""

    def __init__(
        self,
        tracer: Tracer | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """
        Args:
            tracer: None: nobody traces.
            now: monotonic seconds, of the clock that stamps hand-off reports.
            wall_ns: Unix nanoseconds.
        """
        self._tracer = tracer if tracer is not None else NoOpTracer()
        self._now = now
        self._wall_ns = wall_ns
        self.metrics = ReplicaMetrics()

    @contextmanager
    def work(self, name: str, request_id: str, traceparent: str, **attributes: Value) -> Iterator[Work]:
        """A call, from here to the end of the block, under the gateway's span.

        Log lines of the block carry the request's id and its trace's. A block that is cancelled leaves a
        span that says so; its other exceptions pass unrecorded, since their text may hold anything.
        """
        parent, trace_id = _parent(traceparent)
        work = Work(self, INVALID_SPAN, traceparent if trace_id else "")
        span: Span = INVALID_SPAN
        if get_current_span(parent).get_span_context().trace_flags.sampled:
            names = _named({"request_id": request_id, **attributes})
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, names)
            work = Work(self, span, _header(span) or traceparent)
        started, done = self._now(), False
        try:
            with request_fields(request_id, trace_id):
                yield work
            done = True
        finally:
            self.metrics.called(self._now() - started, cancelled=not done)
            if not done:
                span.set_attribute("phasegate.cancelled", True)
            span.end()

    def transfer_span(self, parent: Span, report: HandoffReport) -> None:
        """A transfer that is over. Without its times there is nothing to show but its outcome."""
        end_ns = self._wall_ns()
        start_ns = end_ns
        if report.started_at is not None:
            # Both clocks are this host's: the engine process shares them.
            start_ns = end_ns - int((self._now() - report.started_at) * 1e9)
            end_ns = start_ns + int(report.seconds * 1e9)
        span = self._tracer.start_span(
            "transfer",
            set_span_in_context(parent, Context()),
            SpanKind.INTERNAL,
            _named(
                {
                    "outcome": report.outcome.value,
                    "pages": report.pages,
                    "wire_bytes": report.wire_bytes,
                    "cause": None if report.cause is None else report.cause.value,
                }
            ),
            start_time=start_ns,
        )
        if report.outcome is HandoffOutcome.RECOMPUTED:
            span.set_status(Status(StatusCode.ERROR, "" if report.cause is None else report.cause.value))
        span.end(end_ns)


def _parent(traceparent: str) -> tuple[Context, str]:
    """The context, and its trace's id in hex; empty where there is none, or what there is is not one."""
    context = _W3C.extract({_HEADER: traceparent}, Context())
    parent = get_current_span(context).get_span_context()
    return context, format_trace_id(parent.trace_id) if parent.is_valid else ""


def _header(span: Span) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(_HEADER, "")


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"phasegate.{name}": value for name, value in attributes.items() if value is not None}
