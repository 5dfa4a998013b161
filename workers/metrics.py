"""What an engine replica counts: the one place where its metrics are defined.

Units are in the names. Labels come from enumerations: never a request, a tenant or an address. Which replica
it is, is added by whoever collects.
"""

import math
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kv_transfer.api import EngineGauges, HandoffOutcome, HandoffReport, IntegrityCause, TransferCause
from workers.api import FaultKind

_TRANSFER_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_CALL_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ReplicaMetrics:
    """Counted by one process; `page` is what a scrape gets."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._call_seconds = Histogram(
            "phasegate_engine_call_seconds",
            "From taking a request in to its result, in the engine of the replica's phase.",
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "phasegate_engine_queue_seconds",
            "From giving a request to the engine to its first computed step; decode's includes the transfer.",
            buckets=_CALL_BUCKETS,
            registry=registry,
        )
        self._cancelled = Counter(
            "phasegate_engine_calls_cancelled_total",
            "Calls that the gateway ended: client gone, stop string found, or prefill not needed.",
            registry=registry,
        )
        self._faults = Counter(
            "phasegate_engine_faults_total",
            "Calls that ended in a fault, or were refused, by kind.",
            ("fault",),
            registry=registry,
        )
        self._transfers = Counter(
            "phasegate_transfers_total",
            "Transfers that ended on this decode replica, by outcome and, where they failed, by cause.",
            ("outcome", "cause"),
            registry=registry,
        )
        self._transfer_bytes = Counter(
            "phasegate_transfer_bytes_total",
            "Bytes of pages that came over links.",
            registry=registry,
        )
        self._transfer_pages = Counter(
            "phasegate_transfer_pages_total",
            "Pages that came over links and were copied into the cache.",
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            "phasegate_transfer_seconds",
            "From posting an offer to the last page copied in, of transfers that brought pages.",
            buckets=_TRANSFER_BUCKETS,
            registry=registry,
        )
        self._pages = Gauge("phasegate_cache_pages", "Pages of the engine's cache.", registry=registry)
        self._pages_free = Gauge(
            "phasegate_cache_pages_free",
            "Pages that no request holds; cached but unused ones count as free.",
            registry=registry,
        )
        self._requests = Gauge(
            "phasegate_engine_requests",
            "Requests in the engine, by state.",
            ("state",),
            registry=registry,
        )
        self._preemptions = _Tally(
            Counter(
                "phasegate_engine_preemptions_total",
                "Times that a running request lost its pages to others and waited to be computed again.",
                registry=registry,
            )
        )
        self._in_flight = Gauge(
            "phasegate_transfers_in_flight",
            "Transfers that have begun and not ended, on either side.",
            registry=registry,
        )
        self._bus_queued = Gauge(
            "phasegate_bus_items_queued",
            "Items handed to the token bus and not yet accepted by its sockets: its depth.",
            registry=registry,
        )
        self._bus_dropped = _Tally(
            Counter(
                "phasegate_bus_items_dropped_total",
                "Items that no socket accepted; their receivers see a gap and refetch them.",
                registry=registry,
            )
        )
        self._malformed = _Tally(
            Counter(
                "phasegate_control_messages_malformed_total",
                "Messages on the control channel of transfers that were none.",
                registry=registry,
            )
        )
        self._strangers = _Tally(
            Counter(
                "phasegate_control_clients_refused_total",
                "Connections to the control channel of who is no member of the system.",
                registry=registry,
            )
        )
        mismatches = Counter(
            "phasegate_integrity_mismatches_total",
            "Pages that were not what they should have been, by cause: requests ended, prefix hits refused.",
            ("cause",),
            registry=registry,
        )
        self._mismatches = {cause: _Tally(mismatches.labels(cause.value)) for cause in IntegrityCause}
        self._steps_checked = _Tally(
            Counter(
                "phasegate_integrity_steps_checked_total",
                "Steps of the model whose tables were checked before the forward.",
                registry=registry,
            )
        )
        self._steps_unchecked = _Tally(
            Counter(
                "phasegate_integrity_steps_unchecked_total",
                "Steps of the model that ran with tables unchecked: integrity is off, or not on this device.",
                registry=registry,
            )
        )
        self._pages_checked = _Tally(
            Counter(
                "phasegate_integrity_pages_checked_total",
                "Pages that were compared before they were read.",
                registry=registry,
            )
        )
        self._check_seconds = _Tally(
            Counter(
                "phasegate_integrity_check_seconds_total",
                "Time that the checks took in the engine's thread.",
                registry=registry,
            )
        )
        for kind in FaultKind:
            self._faults.labels(kind.value)
        self._transfers.labels(HandoffOutcome.SHIPPED.value, "")
        self._transfers.labels(HandoffOutcome.NOTHING_MISSING.value, "")
        for cause in TransferCause:
            self._transfers.labels(HandoffOutcome.RECOMPUTED.value, cause.value)

    def called(self, seconds: float, *, cancelled: bool) -> None:
        self._call_seconds.observe(seconds)
        if cancelled:
            self._cancelled.inc()

    def queued(self, seconds: float) -> None:
        self._queue_seconds.observe(seconds)

    def fault(self, kind: FaultKind) -> None:
        self._faults.labels(kind.value).inc()

    def transfer(self, report: HandoffReport) -> None:
        self._transfers.labels(report.outcome.value, report.cause.value if report.cause else "").inc()
        self._transfer_bytes.inc(report.wire_bytes)
        self._transfer_pages.inc(report.pages)
        if report.outcome is HandoffOutcome.SHIPPED:
            self._transfer_seconds.observe(report.seconds)

    def page(self, gauges: EngineGauges | None, *, bus_queue: int, bus_dropped: int) -> bytes:
        """Everything, in Prometheus' text form. Gauges that the engine does not tell are not a number.

        Args:
            bus_dropped: items dropped since the replica started.
        """
        self._pages.set(gauges.total_pages if gauges else math.nan)
        self._pages_free.set(gauges.free_pages if gauges else math.nan)
        self._requests.labels("running").set(gauges.running if gauges else math.nan)
        self._requests.labels("waiting").set(gauges.waiting if gauges else math.nan)
        self._in_flight.set(gauges.in_flight_transfers if gauges else math.nan)
        self._bus_queued.set(bus_queue)
        self._bus_dropped.rise_to(bus_dropped)
        if gauges is not None:
            self._preemptions.rise_to(gauges.preemptions)
            self._malformed.rise_to(gauges.malformed_messages)
            self._strangers.rise_to(gauges.strangers_refused)
            self._integrity(gauges)
        return generate_latest(self._registry)

    def _integrity(self, gauges: EngineGauges) -> None:
        for cause, count in gauges.mismatches.items():
            self._mismatches[IntegrityCause(cause)].rise_to(count)
        self._steps_checked.rise_to(gauges.steps_checked)
        self._steps_unchecked.rise_to(gauges.steps_unchecked)
        self._pages_checked.rise_to(gauges.pages_checked)
        self._check_seconds.rise_to(gauges.check_seconds)


class _Tally:
    """A counter of what somebody else counts."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._seen = 0.0

    def rise_to(self, count: float) -> None:
        self._counter.inc(count - self._seen)
        self._seen = count
