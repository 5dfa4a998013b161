"""Metrics keep to their conventions, and `docs/metrics.md` says what each of them means."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import ApiError
from gateway.metrics import Alone, GatewayMetrics, LostReplica, Outcome, Stage
from kv_transfer.api import HandoffOutcome, IntegrityCause, TransferCause, WireFormat
from tests.support.engines import some_gauges
from workers.api import FaultKind, Phase
from workers.metrics import ReplicaMetrics

PAGE = Path(__file__).parents[2] / "docs/metrics.md"

VALUES = {
    "outcome": {*Outcome, *HandoffOutcome},
    "cause": {*TransferCause, *IntegrityCause, ""},
    "code": {error.code for error in ApiError.__subclasses__()},
    "stage": set(Stage),
    "kind": {"prompt", "cached", "output"},
    "fault": set(FaultKind),
    "phase": set(Phase),
    "reason": {*LostReplica, *Alone},
    "format": set(WireFormat),
    "state": {"running", "waiting"},
}
"""Every label there is, and every value that it may have: all of them from enumerations."""


class Counts:
    malformed = 0
    unclaimed = 0
    refused = 0


@dataclass(frozen=True)
class Told:
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str
    owner: str
    series: frozenset[tuple[tuple[str, str], ...]]

    @property
    def row(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.kind} | {labels} | {self.text} |"


def told(page: bytes, owner: str) -> list[Told]:
    found = []
    for family in text_string_to_metric_families(page.decode()):
        if family.name.endswith("_created"):
            continue
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        series = frozenset(
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le")) for sample in family.samples
        )
        found.append(Told(name, family.type, tuple(sorted(labels)), family.documentation, owner, series))
    return found


def every_metric() -> list[Told]:
    gateway = GatewayMetrics()
    gateway.watch_bus(Counts())
    replica = ReplicaMetrics().page(some_gauges(), bus_queue=0, bus_dropped=0)
    return [*told(gateway.page(0), "gateway"), *told(replica, "engine replica")]


EVERY = every_metric()


@pytest.mark.parametrize("metric", EVERY, ids=lambda m: m.name)
def test_names_have_the_systems_prefix_and_a_unit(metric: Told) -> None:
    units = r"(seconds|bytes|bytes_total|total|pages|pages_free|requests|replicas|in_flight|queued|ratio)"

    assert re.fullmatch(rf"phasegate_[a-z_]+_{units}", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.name.endswith("_seconds") == (metric.kind == "histogram")


@pytest.mark.parametrize("metric", EVERY, ids=lambda m: m.name)
def test_labels_have_a_bounded_set_of_values(metric: Told) -> None:
    for series in metric.series:
        for label, value in series:
            assert value in VALUES[label]


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.name for metric in EVERY]

    assert sorted(names) == sorted(set(names))


def test_what_can_be_asked_for_is_there() -> None:
    assert {metric.name for metric in EVERY} >= {
        "phasegate_time_to_first_token_seconds",
        "phasegate_inter_token_seconds",
        "phasegate_time_per_output_token_seconds",
        "phasegate_request_seconds",
        "phasegate_queue_seconds",
        "phasegate_tokens_total",
        "phasegate_cache_pages",
        "phasegate_cache_pages_free",
        "phasegate_transfer_bytes_total",
        "phasegate_transfer_seconds",
        "phasegate_transfers_total",
        "phasegate_bus_items_queued",
        "phasegate_bus_refetches_total",
        "phasegate_bus_items_dropped_total",
        "phasegate_bus_frames_malformed_total",
        "phasegate_control_messages_malformed_total",
        "phasegate_aborts_total",
        "phasegate_errors_total",
    }


@pytest.mark.parametrize("owner", ["gateway", "engine replica"])
def test_the_page_has_exactly_these_rows(owner: str) -> None:
    section = PAGE.read_text().split(f"## Of each {owner}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]

    assert rows == [metric.row for metric in EVERY if metric.owner == owner]
