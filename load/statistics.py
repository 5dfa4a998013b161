"""Medians and bootstrap intervals. Pure; randomness is an argument."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

ROUNDS = 2000


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of one sample over median of another, with a 95 % percentile bootstrap interval."""

    value: float
    low: float
    high: float


def ratio_of_medians(upper: Sequence[float], lower: Sequence[float], rng: Random) -> Ratio:
    """Both samples are resampled independently.

    Raises:
        ValueError: a sample is empty.
    """
    if not upper or not lower:
        raise ValueError("a ratio needs two samples")
    draws = sorted(
        median(rng.choices(upper, k=len(upper))) / median(rng.choices(lower, k=len(lower)))
        for _ in range(ROUNDS)
    )
    return Ratio(median(upper) / median(lower), draws[int(0.025 * ROUNDS)], draws[int(0.975 * ROUNDS)])
