"""How one request went: its stages, as spans under the trace's root and as figures in the metrics.

Stages leave no gap: one begins where the one before ends, so that their durations add up to the request.
Nothing here holds text, tokens or keys. Of the client's words there is only the validated `x-request-id`.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

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

from gateway.metrics import GatewayMetrics, Outcome, Stage

Value = str | int | float | bool

_W3C: Final = TraceContextTextMapPropagator()
_HEADER: Final = "traceparent"
_FACTS: Final = ("model", "stream", "prompt_tokens", "cached_tokens", "output_tokens", "status")
"""Of a request's log line, those that its root span holds."""


class RequestTrace:
    """One request. Begins in the stage of admission; call `finish` once, at the end."""

    def __init__(self, tracer: Tracer, root: Span, metrics: GatewayMetrics, now: Callable[[], float]) -> None:
        self._tracer, self._root, self._metrics, self._now = tracer, root, metrics, now
        self._context = set_span_in_context(root, Context())
        self._recording = root.is_recording()
        self._began = self._tokens_at = self._first_at = now()
        self._span: Span = INVALID_SPAN
        self.stage = Stage.ADMISSION
        """Where the request is; the last one once it is complete."""
        self._begin_span(Stage.ADMISSION)

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

    def enter(self, stage: Stage) -> None:
        """The stage before ends, this one begins."""
        if self.stage is Stage.ADMISSION:
            self._metrics.admitted(self._now() - self._began)
        self.stage = stage
        self._begin_span(stage)

    def note(self, **attributes: Value | None) -> None:
        """Facts about the stage that runs; None says nothing."""
        if self._recording:
            self._span.set_attributes(_named(attributes))

    def delivered(self) -> None:
        """Tokens came. The first ones begin the last stage."""
        now = self._now()
        if self.stage is not Stage.LAST_TOKEN:
            self.enter(Stage.LAST_TOKEN)
            self._first_at = now
            self._metrics.began(now - self._began)
        else:
            self._metrics.gap_seconds.observe(now - self._tokens_at)
        self._tokens_at = now

    def complete(self) -> None:
        """The last token is here; what is left is to send it."""
        self._span.end()
        self._span = INVALID_SPAN

    def finish(self, facts: Mapping[str, Any]) -> None:
        """The request is over; the facts are those of its log line."""
        word: str | None = facts.get("error") or facts.get("ended")
        self._measure(facts, word)
        if self._recording:
            self._end_spans({name: facts.get(name) for name in _FACTS}, word)

    def _measure(self, facts: Mapping[str, Any], word: str | None) -> None:
        if word is None:
            outcome = Outcome.FINISHED
        else:
            outcome = Outcome.CLIENT_GONE if word == Outcome.CLIENT_GONE else Outcome.FAILED
        self._metrics.ended(outcome, code=word, stage=self.stage)
        if self.stage not in (Stage.FIRST_TOKEN, Stage.LAST_TOKEN):
            return
        output = facts.get("output_tokens", 0)
        self._metrics.tokens(
            prompt=facts.get("prompt_tokens", 0), cached=facts.get("cached_tokens", 0), output=output
        )
        if outcome is Outcome.FINISHED:
            streaming_s = self._tokens_at - self._first_at
            self._metrics.finished(self._now() - self._began, streaming_s=streaming_s, output_tokens=output)

    def _begin_span(self, stage: Stage) -> None:
        if self._recording:
            self._span.end()
            self._span = self._tracer.start_span(stage.value, self._context)

    def _end_spans(self, facts: Mapping[str, Value | None], word: str | None) -> None:
        if word is not None:
            status = Status(StatusCode.ERROR, word)
            self._span.set_status(status)
            self._root.set_status(status)
            self._root.set_attribute("error.type", word)
        self._span.end()
        self._root.set_attributes(_named(facts))
        self._root.end()


class Telemetry:
    """Traces and metrics of one gateway."""

    def __init__(self, tracer: Tracer | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            tracer: None: nobody traces.
            now: monotonic seconds.
        """
        self._tracer = tracer if tracer is not None else NoOpTracer()
        self._now = now
        self.metrics = GatewayMetrics()

    def request(self, request_id: str, label: str, traceparent: str | None) -> RequestTrace:
        """A request's trace: it continues the client's, if that sent a valid `traceparent`; else a new one.

        A client's `tracestate` is not passed on: it may hold anything.
        """
        parent = Context()
        if traceparent is not None:
            parent = _W3C.extract({_HEADER: traceparent}, parent)
        attributes = _named({"request_id": request_id, "label": label})
        root = self._tracer.start_span("request", parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracer, root, self.metrics, self._now)


def _named(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {f"phasegate.{name}": value for name, value in attributes.items() if value is not None}
