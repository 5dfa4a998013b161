"""What a gateway counts: the one place where its metrics are defined.

Units are in the names. Labels come from enumerations: never a request, a tenant, a key or a replica. Which
gateway it is, is added by whoever collects.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

from gateway.errors import ApiError
from gateway.step_histogram import StepHistogram
from kv_transfer.api import WireFormat
from workers.api import FaultKind, Phase

_FIRST_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.5, 5, 10)
_WHOLE_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)


class Stage(StrEnum):
    """Where a request is: names of spans, and a label. One follows the other."""

    ADMISSION = "admission"  # key, body, limits
    RENDER = "render"  # template and tokens
    ROUTE = "route"  # choice of the replicas
    FIRST_TOKEN = "first_token"  # from the calls to the engines to the first token
    LAST_TOKEN = "last_token"  # from the first token to the last


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"


class Alone(StrEnum):
    """Why decode computed a prompt itself."""

    NO_PREFILL = "no_prefill"  # no prefill replica was there that could
    PREFILL_FAILED = "prefill_failed"  # the one that was asked did not deliver


class LostReplica(StrEnum):
    """Why a gateway gave a replica up."""

    REMOVED = "removed"  # Serve does not list it any more
    SILENT = "silent"  # nothing of it came over the bus


class BusCounts(Protocol):
    """What the token bus's receiver has counted since its start."""

    @property
    def malformed(self) -> int:
        """Frames that were none, or of another version."""

    @property
    def unclaimed(self) -> int:
        """Items that no request waited for."""

    @property
    def refused(self) -> int:
        """Connections of who is no member of the system."""


class GatewayMetrics:
    """Counted by one process; `page` is what a scrape gets."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "phasegate_requests_total",
            "Requests that ended, refused ones included, by outcome.",
            ("outcome",),
            registry=registry,
        )
        self._errors = Counter(
            "phasegate_errors_total",
            "Errors that clients were told, in an answer or in a stream, by their word.",
            ("code",),
            registry=registry,
        )
        self._aborts = Counter(
            "phasegate_aborts_total",
            "Requests whose client left, by the stage in which it did.",
            ("stage",),
            registry=registry,
        )
        self._in_flight = Gauge(
            "phasegate_requests_in_flight", "Requests that are being answered.", registry=registry
        )
        self._queue_seconds = Histogram(
            "phasegate_queue_seconds",
            "From a request's arrival to its admission: key, body and limits.",
            buckets=_QUEUE_BUCKETS,
            registry=registry,
        )
        self._first_seconds = Histogram(
            "phasegate_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_FIRST_BUCKETS,
            registry=registry,
        )
        self.gap_seconds: Final = StepHistogram(
            "phasegate_inter_token_seconds",
            "Between one arrival of tokens and the next, in one request.",
            _TOKEN_BUCKETS,
        )
        registry.register(self.gap_seconds)
        self._per_token_seconds = Histogram(
            "phasegate_time_per_output_token_seconds",
            "Of each finished request: from the first token to the last, over the tokens after the first.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._whole_seconds = Histogram(
            "phasegate_request_seconds",
            "From the arrival of a finished request to the end of its answer.",
            buckets=_WHOLE_BUCKETS,
            registry=registry,
        )
        self._tokens = Counter(
            "phasegate_tokens_total",
            "Tokens of requests that reached the engines: of prompts, of those found cached, of answers.",
            ("kind",),
            registry=registry,
        )
        self.bus_gaps: Final = Counter(
            "phasegate_bus_refetches_total",
            "Gaps on the token bus for which tokens were asked for again.",
            registry=registry,
        )
        self._faults = Counter(
            "phasegate_engine_answers_failed_total",
            "Calls to engines that ended in a fault, by phase and kind.",
            ("phase", "fault"),
            registry=registry,
        )
        self._lost = Counter(
            "phasegate_replicas_lost_total",
            "Engine replicas that this gateway gave up, by reason.",
            ("reason",),
            registry=registry,
        )
        self._decode_alone = Counter(
            "phasegate_decode_alone_total",
            "Requests whose prompt decode computed itself instead of prefill, by reason.",
            ("reason",),
            registry=registry,
        )
        self._decode_formats = Counter(
            "phasegate_decode_requests_total",
            "Requests given to decode engines, by the format of their cache.",
            ("format",),
            registry=registry,
        )
        self._format_switches = Counter(
            "phasegate_decode_format_switches_total",
            "Times that new requests turned to decode engines with a cache of another format.",
            registry=registry,
        )
        self._pressure = Gauge(
            "phasegate_decode_pages_used_ratio",
            "Pages in use on decode over those of its widest format, at a request; 0 with one format.",
            registry=registry,
        )
        self._drifted = Gauge(
            "phasegate_drifted_replicas",
            "Engine replicas that get no requests: they serve another model than the gateway, by phase.",
            ("phase",),
            registry=registry,
        )
        self._zero()

    def _zero(self) -> None:
        """Every series is there from the start: a rate needs the 0 before the first 1."""
        for outcome in Outcome:
            self._requests.labels(outcome.value)
        for code in sorted({error.code for error in ApiError.__subclasses__()}):
            self._errors.labels(code)
        for stage in Stage:
            self._aborts.labels(stage.value)
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(kind)
        for reason in LostReplica:
            self._lost.labels(reason.value)
        for why in Alone:
            self._decode_alone.labels(why.value)
        for format in WireFormat:
            self._decode_formats.labels(format.value)
        for phase in Phase:
            self._drifted.labels(phase.value)
            for kind_of_fault in FaultKind:
                self._faults.labels(phase.value, kind_of_fault.value)

    def watch_bus(self, counts: BusCounts) -> None:
        self._registry.register(_BusCollector(counts))

    def watch_drift(self, count: Callable[[Phase], int]) -> None:
        """`count`: replicas of this phase that have drifted, asked at each scrape."""
        for phase in Phase:
            self._drifted.labels(phase.value).set_function(partial(count, phase))

    def ended(self, outcome: Outcome, *, code: str | None, stage: Stage) -> None:
        """A request is over. `code`: what its client was told; `stage`: where it was."""
        self._requests.labels(outcome.value).inc()
        if outcome is Outcome.CLIENT_GONE:
            self._aborts.labels(stage.value).inc()
        elif code is not None:
            self._errors.labels(code).inc()

    def admitted(self, seconds: float) -> None:
        self._queue_seconds.observe(seconds)

    def began(self, seconds: float) -> None:
        """The first token came so long after the request."""
        self._first_seconds.observe(seconds)

    def finished(self, seconds: float, *, streaming_s: float, output_tokens: int) -> None:
        """A complete answer. `streaming_s`: from the first token to the last."""
        self._whole_seconds.observe(seconds)
        if output_tokens > 1:
            self._per_token_seconds.observe(streaming_s / (output_tokens - 1))

    def tokens(self, *, prompt: int, cached: int, output: int) -> None:
        for kind, count in (("prompt", prompt), ("cached", cached), ("output", output)):
            self._tokens.labels(kind).inc(count)

    def fault(self, phase: Phase, kind: FaultKind) -> None:
        self._faults.labels(phase.value, kind.value).inc()

    def lost(self, reason: LostReplica) -> None:
        self._lost.labels(reason.value).inc()

    def decode_alone(self, why: Alone) -> None:
        self._decode_alone.labels(why.value).inc()

    def decode_format(self, format: WireFormat) -> None:
        self._decode_formats.labels(format.value).inc()

    def decode_format_switched(self) -> None:
        self._format_switches.inc()

    def decode_pressure(self, share: float) -> None:
        self._pressure.set(share)

    def page(self, in_flight: int) -> bytes:
        """Everything, in Prometheus' text form."""
        self._in_flight.set(in_flight)
        return generate_latest(self._registry)


class _BusCollector:
    """Reads the receiver's own counts when asked, so that frames cost nothing more."""

    def __init__(self, counts: BusCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "phasegate_bus_frames_malformed_total",
            "Messages on the token bus that were no frame, or of another version.",
            value=self._counts.malformed,
        )
        yield CounterMetricFamily(
            "phasegate_bus_items_unclaimed_total",
            "Items on the token bus that no request waited for: news of requests that are over.",
            value=self._counts.unclaimed,
        )
        yield CounterMetricFamily(
            "phasegate_bus_clients_refused_total",
            "Connections to the token bus of who is no member of the system.",
            value=self._counts.refused,
        )
