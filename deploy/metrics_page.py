"""One page of metrics out of those of all processes. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPage:
    """What one process said."""

    process: str
    """`gateway`, `prefill` or `decode`."""
    replica: str
    text: str | None
    """In Prometheus' text form; None: it did not answer."""


def merge(pages: Iterable[ProcessPage]) -> bytes:
    """Every series of every page, with `process` and `replica`, in Prometheus' text form."""
    return generate_latest(_Merged(list(pages)))


class _Merged:
    def __init__(self, pages: list[ProcessPage]) -> None:
        self._pages = sorted(pages, key=lambda page: (page.process, page.replica))

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "phasegate_replica_up",
            "1: the replica answered for its metrics; 0: it is there and did not.",
            labels=("process", "replica"),
        )
        merged: dict[str, Metric] = {}
        for page in self._pages:
            up.add_metric((page.process, page.replica), 0.0 if page.text is None else 1.0)
            for family in text_string_to_metric_families(page.text or ""):
                if family.name.endswith("_created"):
                    continue  # when each series began: as many lines again, and nobody asks
                known = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "process": page.process, "replica": page.replica}
                    known.add_sample(sample.name, labels, sample.value)
        yield up
        yield from merged.values()
