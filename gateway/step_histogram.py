"""A histogram for what happens with every token: one event loop writes, so it takes no lock."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class StepHistogram:
    """A Prometheus collector. `observe` may be called by one thread only."""

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        """
        Args:
            buckets: upper bounds, rising, without the infinite one.
        """
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        yield HistogramMetricFamily(
            self._name,
            self._documentation,
            buckets=list(zip(names, accumulate(self._counts), strict=True)),
            sum_value=self._sum,
        )
