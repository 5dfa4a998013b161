"""Percentiles and bootstrap intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def named(self, name: str, digits: int = 3) -> dict[str, float]:
        """As rows and summaries of result files have it."""
        return {
            name: round(self.value, digits),
            f"{name}_low95": round(self.low, digits),
            f"{name}_high95": round(self.high, digits),
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest ranks; `share` is in [0, 1].

    Raises:
        ValueError: there are no values, or the share is out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ValueError(f"no percentile {share} of {len(values)} values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def bootstrap(
    values: Sequence[float],
    rng: Random,
    *,
    statistic: Callable[[Sequence[float]], float] = median,
    resamples: int = RESAMPLES,
) -> Interval:
    """95 % percentile interval of a statistic.

    Give ratios of pairs, not two lists: what slows both members of a pair then cancels.

    Raises:
        ValueError: there are no values.
    """
    value = statistic(values)
    drawn = [statistic(rng.choices(values, k=len(values))) for _ in range(resamples)]
    return Interval(value=value, low=percentile(drawn, 0.025), high=percentile(drawn, 0.975))
