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
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kv_transfer.api import HandoffOutcome, HandoffReport, request_fields
from workers.api import FaultKind

Value = str | int | float | bool

_W3C: Final = TraceContextTextMapPropagator()
_HEADER: Final = "traceparent"


class Work:
    """The span of one call. Every method costs next to nothing when the request is not sampled."""

    def __init__(self, spans: "Spans", span: Span, traceparent: str) -> None:
        self._spans = spans
        self._span = span
        self.traceparent = traceparent
        """Context of this work, for what it asks of others; empty when nobody traces."""

    def note(self, **attributes: Value | None) -> None:
        """Facts about the work; None says nothing."""
        if self._span.is_recording():
            self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, fault: FaultKind) -> None:
        if self._span.is_recording():
            self._span.set_attribute("phasegate.fault", fault.value)
            self._span.set_status(Status(StatusCode.ERROR, fault.value))

    def transfer(self, report: HandoffReport | None) -> None:
        """The transfer that the engine reports, as a child with the engine's own times."""
        if report is not None and self._span.is_recording():
            self._spans.transfer(self._span, report)


class Spans:
    """Makes the spans of one replica."""

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

    @contextmanager
    def work(self, name: str, request_id: str, traceparent: str, **attributes: Value) -> Iterator[Work]:
        """The span of a call, from here to the end of the block, under the gateway's.

        Log lines of the block carry the request's id and its trace's. A block that is cancelled leaves a
        span that says so; its other exceptions pass unrecorded, since their text may hold anything.
        """
        parent = _parent(traceparent)
        if parent is None:
            with request_fields(request_id):
                yield Work(self, INVALID_SPAN, "")
            return
        with request_fields(request_id, _trace_id(traceparent)):
            span: Span = get_current_span(parent)
            if not span.get_span_context().trace_flags.sampled:
                yield Work(self, INVALID_SPAN, traceparent)
                return
            names = _named({"request_id": request_id, **attributes})
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, names)
            done = False
            try:
                yield Work(self, span, _header(span) or traceparent)
                done = True
            finally:
                if not done:
                    span.set_attribute("phasegate.cancelled", True)
                span.end()

    def transfer(self, parent: Span, report: HandoffReport) -> None:
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


def _parent(traceparent: str) -> Context | None:
    """None when there is no valid one."""
    if not traceparent:
        return None
    context = _W3C.extract({_HEADER: traceparent}, Context())
    return context if get_current_span(context).get_span_context().is_valid else None


def _trace_id(traceparent: str) -> str:
    return traceparent.split("-")[1]


def _header(span: Span) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(_HEADER, "")


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"phasegate.{name}": value for name, value in attributes.items() if value is not None}
