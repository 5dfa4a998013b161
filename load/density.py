"""What a denser cache is worth: closed loops on a decode engine whose cache holds a given number of pages.

First without bounds on the cache: T(c), tokens/s with c requests at once. Where twice as many at once are
faster by a third or more, a cache that holds c requests, and no more, is what a denser format can help:
T(2c) / T(c) is the most that twice as many tokens in the same bytes can bring. Prompts are computed before
the clock starts, by prefill.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from load.statistics import median

LEAST_GAIN: Final = 1.3
"""T(2c) over T(c)."""
TARGET: Final = 0.9
"""Of the ceiling."""
WIDE: Final = "bf16"
NARROW: Final = "fp8_e4m3"
ARMS: Final = (WIDE, NARROW)


@dataclass(frozen=True, slots=True)
class Loop:
    """What one closed loop brought."""

    arm: str
    pages: int | None
    """Of the cache; None: more than enough."""
    concurrency: int
    tok_s: float
    preemptions: int
    most_running: int
    itl_s: float
    """A client's seconds a token, its waiting included."""


def requests(concurrency: int) -> int:
    """In a loop: each client makes two, and of many clients some only one."""
    return concurrency + min(concurrency, 16)


def pages_of(tokens: int, block_size: int, requests: int) -> int:
    """That so many requests fill."""
    return requests * -(-tokens // block_size)


def prompts(rng: Random, count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Of random tokens: no two share a page."""
    return [rng.choices(range(vocabulary), k=tokens) for _ in range(count)]


def curve(loops: Sequence[Loop], arm: str, pages: int | None) -> dict[int, float]:
    """Tokens/s by concurrency: medians over repeats."""
    by: defaultdict[int, list[float]] = defaultdict(list)
    for loop in loops:
        if (loop.arm, loop.pages) == (arm, pages):
            by[loop.concurrency].append(loop.tok_s)
    return {concurrency: median(found) for concurrency, found in sorted(by.items())}


def c_star(unbounded: Mapping[int, float], least: int = 2) -> int | None:
    """The largest measured concurrency at which twice as many still bring enough; None: there is none."""
    able = [
        c
        for c, found in unbounded.items()
        if c >= least and 2 * c in unbounded and unbounded[2 * c] >= LEAST_GAIN * found
    ]
    return max(able, default=None)


@dataclass(frozen=True, slots=True)
class Worth:
    """By which loops are judged."""

    cache_gib: float
    """The bytes of either bounded cache."""
    itl_bound_s: float
    """Of a useful token, on the whole."""
    cost_per_hour: float | None

    def useful(self, loop: Loop) -> float | None:
        """Tokens/s for each GiB of cache; None without bounds."""
        if loop.pages is None:
            return None
        return loop.tok_s / self.cache_gib if loop.itl_s <= self.itl_bound_s else 0.0

    def cost_per_mtok(self, loop: Loop) -> float | None:
        return None if self.cost_per_hour is None else self.cost_per_hour / 3600 / loop.tok_s * 1e6


def rows(loops: Sequence[Loop], worth: Worth) -> list[dict[str, Any]]:
    """One for each size of the cache, format and concurrency: medians, and preemptions of all loops."""
    by: defaultdict[tuple[bool, str, int], list[Loop]] = defaultdict(list)
    for loop in loops:
        by[loop.pages is not None, loop.arm, loop.concurrency].append(loop)
    return [
        {
            "kv_format": arm,
            "pages": found[0].pages,
            "concurrency": concurrency,
            "loops": len(found),
            "tok_s": _median([loop.tok_s for loop in found]),
            "itl_ms": _median([1000 * loop.itl_s for loop in found]),
            "useful_tok_s_per_gib": _median([worth.useful(loop) for loop in found]),
            "cost_per_mtok": _median([worth.cost_per_mtok(loop) for loop in found]),
            "preemptions": sum(loop.preemptions for loop in found),
            "most_running": max(loop.most_running for loop in found),
        }
        for (_, arm, concurrency), found in sorted(by.items())
    ]


def _median(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(median(numbers), 2) if numbers else None


def summary(
    loops: Sequence[Loop], sizes: Mapping[str, int], star: int | None, worth: Worth
) -> dict[str, Any]:
    """
    Args:
        sizes: pages of the bounded caches, by arm.
    """
    unbounded = curve(loops, WIDE, None)
    found: dict[str, Any] = {
        "unbounded_tok_s": {str(c): round(t, 2) for c, t in unbounded.items()},
        "no_cstar": star is None,
        "c_star": star,
        "ceiling": None,
        "best_throughput_ratio": None,
    }
    if star is None:
        return found
    bounded = {arm: curve(loops, arm, sizes[arm]) for arm in ARMS}
    best = {arm: max(by.values()) for arm, by in bounded.items()}
    ratio, ceiling = best[NARROW] / best[WIDE], unbounded[2 * star] / unbounded[star]
    mine = {arm: [loop for loop in loops if (loop.arm, loop.pages) == (arm, sizes[arm])] for arm in ARMS}
    return found | {
        "ceiling": round(ceiling, 3),
        "best_throughput_ratio": round(ratio, 3),
        "share_of_ceiling": round(ratio / ceiling, 3),
        "target_met": ratio >= TARGET * ceiling,
        "best_tok_s": {arm: round(value, 2) for arm, value in best.items()},
        "equal_concurrency_ratio": {
            str(c): round(bounded[NARROW][c] / bounded[WIDE][c], 3) for c in bounded[WIDE]
        },
        "preemptions": {arm: sum(loop.preemptions for loop in mine[arm]) for arm in ARMS},
        "useful_tok_s_per_gib": {
            arm: max(row["useful_tok_s_per_gib"] for row in rows(mine[arm], worth)) for arm in ARMS
        },
        "cost_per_mtok": {
            arm: None
            if worth.cost_per_hour is None
            else min(r["cost_per_mtok"] for r in rows(mine[arm], worth))
            for arm in ARMS
        },
    }


def objections(loops: Sequence[Loop], wanted: int) -> list[str]:
    """Why the figures say nothing; empty when they do."""
    return [] if len(loops) == wanted else [f"{len(loops)} loops of {wanted}"]
