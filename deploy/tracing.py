"""One process's tracer: OpenTelemetry's SDK, its samplers, its batches, and where finished spans go.

There is no global tracer: a library in the same process that traces by itself keeps to itself.
"""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode, Tracer, format_span_id, format_trace_id

from deploy.config import TracingConfig
from deploy.trace_files import PREFIX, Event, SpanFile, SpanRecord, Value

Process = Literal["gateway", "prefill", "decode"]

BATCH_DELAY_MS: Final = 500
"""Longest that a finished span waits for others before it is written."""
PATIENCE_S: Final = 5.0
"""Longest that a collector may take for a batch, retries included, and that the end of a process waits."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessTracing:
    """Keep it for as long as the process works, then close it."""

    tracer: Tracer | None
    """None: the configuration names no place for spans."""
    provider: TracerProvider | None
    patience_s: float = PATIENCE_S

    async def close(self) -> None:
        """Writes out what waits. Bounded."""
        if self.provider is None:
            return
        try:
            async with asyncio.timeout(self.patience_s):
                await asyncio.to_thread(self.provider.shutdown)
        except TimeoutError:
            log.warning("tracing.flush.late seconds=%g", self.patience_s)


def start_tracing(
    config: TracingConfig, process: Process, replica: str, logs: Path, *, patience_s: float = PATIENCE_S
) -> ProcessTracing:
    """Spans of this process go from now on where the configuration says."""
    exporters: list[SpanExporter] = []
    if config.file:
        file = SpanFile(logs / f"{PREFIX}{process}-{replica}.jsonl")
        exporters.append(FileExporter(file, process, replica))
    if config.otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporters.append(OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=patience_s))
    if not exporters:
        return ProcessTracing(None, None)
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
        resource=Resource.create(
            {SERVICE_NAME: f"phasegate-{process}", SERVICE_INSTANCE_ID: replica, "process.pid": os.getpid()}
        ),
        shutdown_on_exit=False,
    )
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_DELAY_MS))
    return ProcessTracing(provider.get_tracer("phasegate"), provider, patience_s)


class FileExporter(SpanExporter):
    """Called by one thread of the batch processor."""

    def __init__(self, file: SpanFile, process: Process, replica: str) -> None:
        self._file = file
        self._process = process
        self._replica = replica

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._file.write([self._record(span) for span in spans])
        except OSError as bad:
            log.warning("tracing.file.failed reason=%s spans=%d", bad.strerror, len(spans))
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True  # every export is flushed

    def _record(self, span: ReadableSpan) -> SpanRecord:
        context = span.get_span_context()
        assert context is not None
        failed = span.status.status_code is StatusCode.ERROR
        return SpanRecord(
            trace_id=format_trace_id(context.trace_id),
            span_id=format_span_id(context.span_id),
            parent_id="" if span.parent is None else format_span_id(span.parent.span_id),
            name=span.name,
            process=self._process,
            replica=self._replica,
            pid=os.getpid(),
            start_ns=span.start_time or 0,
            end_ns=span.end_time or 0,
            error=(span.status.description or "error") if failed else "",
            attributes=_plain(span.attributes),
            events=tuple(
                Event(name=event.name, at_ns=event.timestamp, attributes=_plain(event.attributes))
                for event in span.events
            ),
        )


def _plain(attributes: Mapping[str, Any] | None) -> dict[str, Value]:
    """Those that are no lists."""
    return {n: value for n, value in (attributes or {}).items() if isinstance(value, str | int | float)}
