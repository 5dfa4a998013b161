"""What formats of the cache do to the probabilities of the next token.

A float32 engine answers prompts greedily. Every other configuration is led along those answers, token by
token, and says at each how probable it would have found that token, and all others. Differences to float32
are means over an answer's tokens; intervals are over prompts.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

from load.statistics import Interval, bootstrap

QUESTIONS: Final = Path(__file__).parent / "questions.json"
CONTEXT: Final = 1024
"""Tokens of a prompt and its answer, at most: all questions are shorter."""


@dataclass(frozen=True, slots=True)
class Configuration:
    name: str
    kv_format: str
    dtype: str = "bfloat16"
    pair: bool = False
    """Prefill in BF16, decode in this format; else one engine for both."""
    writes: str = "nearest"
    calibrated: bool = False
    skew: float = 1.0
    """Decode reads by so many times the key scales that prefill was told."""


REFERENCE: Final = Configuration("float32", "fp32", dtype="float32")
BF16: Final = Configuration("one engine, BF16", "bf16")
UNIFORM_STOCK: Final = Configuration("one engine, FP8, writes cut off", "fp8_e4m3", writes="stock")
UNIFORM: Final = Configuration("one engine, FP8", "fp8_e4m3")
STOCK: Final = Configuration("BF16 to FP8, writes cut off", "fp8_e4m3", pair=True, writes="stock")
OURS: Final = Configuration("BF16 to FP8", "fp8_e4m3", pair=True)
CALIBRATED: Final = Configuration("BF16 to FP8, measured scales", "fp8_e4m3", pair=True, calibrated=True)
CONTROL: Final = Configuration("BF16 to FP8, one side's key scales doubled", "fp8_e4m3", pair=True, skew=2.0)
COMPARED: Final = ((BF16,), (UNIFORM_STOCK,), (UNIFORM,), (STOCK,), (OURS, CONTROL), (CALIBRATED,))
"""Those in one tuple are measured with the same engines, one after the other."""


def questions(most: int) -> list[str]:
    found: list[str] = json.loads(QUESTIONS.read_text())["questions"]
    return found[:most]


def profile_of(
    base: Mapping[str, Any], configuration: Configuration, threads: int, scales: Path | None
) -> dict[str, Any]:
    """A profile of the engines of this configuration.

    Args:
        base: a shipped profile.
        scales: file with measured ones, where the configuration wants them.
    """
    wide = "bfloat16" if configuration.pair else configuration.dtype
    decode = {
        "dtype": configuration.dtype,
        "kv_format": configuration.kv_format,
        "kv_writes": configuration.writes,
        "threads": threads,
    }
    if configuration.calibrated:
        decode["kv_scales"] = str(scales)
    own = ("kv_format", "kv_scales")
    cut = {phase: {k: v for k, v in base[phase].items() if k not in own} for phase in ("prefill", "decode")}
    return {
        **base,
        "context_length": CONTEXT,
        "prefill": cut["prefill"] | {"dtype": wide, "threads": threads},
        "decode": cut["decode"] | decode,
    }


@dataclass(frozen=True, slots=True)
class Found:
    """Of one configuration, by prompt: a number for each token of the answer."""

    dlogprob: tuple[tuple[float, ...], ...]
    kl: tuple[tuple[float, ...], ...]
    same_argmax: tuple[tuple[bool, ...], ...]
    outcomes: tuple[str | None, ...]
    """Of hand-offs."""

    @classmethod
    def of(cls, scored: Sequence[Mapping[str, Any]]) -> "Found":
        return cls(
            dlogprob=tuple(tuple(row["dlogprob"]) for row in scored),
            kl=tuple(tuple(row["kl"]) for row in scored),
            same_argmax=tuple(tuple(row["same_argmax"]) for row in scored),
            outcomes=tuple(row["outcome"] for row in scored),
        )


def rows(found: Mapping[Configuration, Found], rng: Random) -> list[dict[str, Any]]:
    """One for each configuration."""
    table = []
    for configuration, each in found.items():
        row: dict[str, Any] = {"configuration": configuration.name, "prompts": len(each.dlogprob)}
        row |= _mean(each.dlogprob, rng).named("dlogprob", 5) | _mean(each.kl, rng).named("kl", 5)
        row |= {
            "argmax_agrees": round(fmean(map(fmean, each.same_argmax)), 4),
            "dlogprob_first": round(fmean(numbers[0] for numbers in each.dlogprob), 4),
            "first_same": sum(same[0] for same in each.same_argmax),
            "shipped": Counter(each.outcomes)["shipped"],
        }
        table.append(row)
    return table


def summary(found: Mapping[Configuration, Found], rng: Random) -> dict[str, Any]:
    """Means by configuration, and what is claimed of them."""
    better = {
        name: _mean(
            [
                [a - b for a, b in zip(ours, theirs, strict=True)]
                for ours, theirs in zip(found[OURS].dlogprob, found[other].dlogprob, strict=True)
            ],
            rng,
        )
        for name, other in (("ours_less_uniform_stock", UNIFORM_STOCK), ("ours_less_uniform", UNIFORM))
    }
    return {
        "dlogprob": {c.name: round(fmean(map(fmean, each.dlogprob)), 5) for c, each in found.items()},
        "kl": {c.name: round(fmean(map(fmean, each.kl)), 5) for c, each in found.items()},
        **better["ours_less_uniform_stock"].named("ours_less_uniform_stock", 5),
        **better["ours_less_uniform"].named("ours_less_uniform", 5),
        "more_accurate_than_uniform": all(each.high < 0 for each in better.values()),
        "control_seen": control_seen(found, rng),
    }


def control_seen(found: Mapping[Configuration, Found], rng: Random) -> bool:
    """Whether the wrong scales show: else the comparison could not see a wrong conversion either."""
    return _mean(found[CONTROL].dlogprob, rng).low > 2 * _mean(found[OURS].dlogprob, rng).high


def objections(found: Mapping[Configuration, Found], rng: Random) -> list[str]:
    """Why the figures say nothing; empty when they do."""
    told = []
    for configuration, each in found.items():
        wanted = "shipped" if configuration.pair else None
        other = [outcome for outcome in each.outcomes if outcome != wanted]
        if other:
            told.append(f"{configuration.name}: {len(other)} hand-offs ended {sorted(set(map(str, other)))}")
    if not control_seen(found, rng):
        told.append("scales that are wrong on one side do not show")
    return told


def _mean(by_prompt: Sequence[Sequence[float]], rng: Random) -> Interval:
    return bootstrap([fmean(numbers) for numbers in by_prompt], rng, statistic=fmean)
