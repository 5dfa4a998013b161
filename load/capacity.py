"""What a server does under a load: one row of figures from the records of its requests. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from load.client import TIMEOUT
from load.record import Record
from load.statistics import median, percentile

HEADLINES: Final = (
    "throughput_tok_s",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "e2e_p95_ms",
    "failed",
    "timeout_rate",
    "useful_tok_s_per_gib",
    "cost_per_mtok",
)

Batch = tuple[Record, ...]
"""Requests of one loop: from the first that was due to the last that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What makes a token useful, and what it costs."""

    ttft_bound_s: float
    itl_bound_s: float
    """Of a request: 95 % of its gaps are at most so long."""
    cache_gib: float | None = None
    """The server's cache, all its engines together."""
    cost_per_hour: float | None = None


def row(batches: Sequence[Batch], terms: Terms) -> dict[str, Any]:
    """Figures over all batches: rates are of the time in which at least one request was in the server."""
    records = [record for batch in batches for record in batch]
    good = [record for record in records if not record.failed]
    seconds = sum(span_s(batch) for batch in batches)
    found: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "timeout_rate": round(sum(r.error == TIMEOUT for r in records) / len(records), 4)
        if records
        else None,
        "seconds": round(seconds, 2),
    }
    if not good or not seconds:
        return found | dict.fromkeys(name for name in HEADLINES if name not in found)
    tokens = sum(record.output_tokens for record in good)
    useful = sum(record.output_tokens for record in good if within(record, terms))
    gaps_s = [gap for record in good for gap in record.gaps_s]
    rate = tokens / seconds
    return found | {
        "prompt_tokens": round(median([record.prompt_tokens for record in good])),
        "output_tokens": round(median([record.output_tokens for record in good])),
        "throughput_tok_s": round(rate, 1),
        "requests_per_s": round(len(good) / seconds, 3),
        "ttft_p50_ms": _ms([record.ttft_s for record in good], 0.5),
        "ttft_p95_ms": _ms([record.ttft_s for record in good], 0.95),
        "itl_p50_ms": _ms(gaps_s, 0.5),
        "itl_p95_ms": _ms(gaps_s, 0.95),
        "e2e_p95_ms": _ms([record.e2e_s for record in good], 0.95),
        "useful_share": round(useful / tokens, 4),
        "useful_tok_s_per_gib": None
        if terms.cache_gib is None
        else round(useful / seconds / terms.cache_gib, 2),
        "cost_per_mtok": None
        if terms.cost_per_hour is None
        else round(terms.cost_per_hour / 3600 / rate * 1e6, 4),
    }


def span_s(batch: Batch) -> float:
    """From when its first request was due to when its last good one was complete; 0 without a good one."""
    ends = [record.end_s for record in batch if not record.failed]
    return max(ends) - min(record.due_s for record in batch) if ends else 0.0


def within(record: Record, terms: Terms) -> bool:
    """Whether the request met both bounds."""
    gaps_s = record.gaps_s
    slow = percentile(gaps_s, 0.95) if gaps_s else 0.0
    return record.ttft_s <= terms.ttft_bound_s and slow <= terms.itl_bound_s


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of the row with the highest throughput, which is named; failures are those of all rows."""
    measured = [row for row in rows if row["throughput_tok_s"] is not None]
    if not measured:
        return dict.fromkeys(HEADLINES) | {"failed": sum(row["failed"] for row in rows), "at": None}
    best = max(measured, key=lambda row: float(row["throughput_tok_s"]))
    requests = sum(row["requests"] for row in rows)
    timeouts = sum(row["timeout_rate"] * row["requests"] for row in rows)
    return {name: best[name] for name in HEADLINES} | {
        "failed": sum(row["failed"] for row in rows),
        "timeout_rate": round(timeouts / requests, 4),
        "at": {name: best[name] for name in ("loop", "concurrency", "rate_rps", "prompt_tokens_aim")},
    }


def withheld(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run that is not valid: its headline figures are taken out."""
    return dict(summary) | dict.fromkeys(name for name in HEADLINES if name != "failed")


def _ms(values_s: Sequence[float], share: float) -> float | None:
    return round(percentile(values_s, share) * 1000, 2) if values_s else None
