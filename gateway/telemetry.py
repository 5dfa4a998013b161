"""The gateway's part of a request's trace: the root, and the stages that follow each other under it.

Stages leave no gap: one begins where the one before ends, so that their durations add up to the request.
Nothing here holds text, tokens or keys. Of the client's words there is only the validated `x-request-id`.
"""

from collections.abc import Mapping
from enum import StrEnum
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
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Value = str | int | float | bool

_W3C: Final = TraceContextTextMapPropagator()
_HEADER: Final = "traceparent"


class Stage(StrEnum):
    """Names of spans; also the metric label `stage`: where a request was when its client left."""

    ADMISSION = "admission"  # key, body, limits
    RENDER = "render"  # template and tokens
    ROUTE = "route"  # choice of the replicas
    FIRST_TOKEN = "first_token"  # from the calls to the engines to the first token
    LAST_TOKEN = "last_token"  # from the first token to the last


class RequestTrace:
    """One request. Begins in the stage of admission; call `finish` once, at the end."""

    def __init__(self, tracer: Tracer, root: Span) -> None:
        self._tracer = tracer
        self._root = root
        self._context = set_span_in_context(root, Context())
        self._recording = root.is_recording()
        self._span: Span = INVALID_SPAN
        self.stage: Stage | None = None
        """Where the request is; None after the last token."""
        self.enter(Stage.ADMISSION)

    @property
    def trace_id(self) -> str:
        """In hex; empty when nobody traces."""
        context = self._root.get_span_context()
        return format_trace_id(context.trace_id) if context.is_valid else ""

    @property
    def sampled(self) -> bool:
        return self._recording

    @property
    def traceparent(self) -> str:
        """The root's context, for the engines; empty when nobody traces."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return carrier.get(_HEADER, "")

    def enter(self, stage: Stage | None) -> None:
        """The stage before ends, this one begins."""
        self.stage = stage
        if self._recording:
            self._span.end()
            self._span = (
                INVALID_SPAN if stage is None else self._tracer.start_span(stage.value, self._context)
            )

    def note(self, **attributes: Value | None) -> None:
        """Facts about the stage that runs; None says nothing."""
        if self._recording:
            self._span.set_attributes(_named(attributes))

    def finish(self, facts: Mapping[str, Value | None], error: str | None) -> None:
        """The request is over; `error` is the word of what ended it early, on the stage and on the root."""
        if not self._recording:
            return
        if error is not None:
            status = Status(StatusCode.ERROR, error)
            self._span.set_status(status)
            self._root.set_status(status)
            self._root.set_attribute("error.type", error)
        self._span.end()
        self._root.set_attributes(_named(facts))
        self._root.end()


class Tracing:
    """Makes the traces of one gateway."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        """`tracer` None: nobody traces."""
        self._tracer = tracer if tracer is not None else NoOpTracer()

    def request(self, request_id: str, label: str, traceparent: str | None) -> RequestTrace:
        """A trace that continues the client's, if it sent a valid `traceparent`; else a new one.

        A client's `tracestate` is not passed on: it may hold anything.
        """
        parent = Context()
        if traceparent is not None:
            parent = _W3C.extract({_HEADER: traceparent}, parent)
        attributes = _named({"request_id": request_id, "label": label})
        root = self._tracer.start_span("request", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, root)


def untraced() -> RequestTrace:
    """For a request that nobody follows."""
    return RequestTrace(NoOpTracer(), INVALID_SPAN)


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"phasegate.{name}": value for name, value in attributes.items() if value is not None}
