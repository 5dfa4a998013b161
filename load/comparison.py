"""From pairs of measured batches to rows and ratios: pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from load.plan import Cell
from load.record import Record
from load.statistics import bootstrap, median, percentile


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair: by arm, the records of a batch that was sent at one moment."""

    cell: Cell
    records: Mapping[str, tuple[Record, ...]]

    def ratios(self, ours: str, theirs: str) -> tuple[float, float] | None:
        """(TTFT, tokens/s) of ours over theirs; None when a request failed or had no rate."""
        found = []
        for arm in (ours, theirs):
            records = self.records[arm]
            rates = [rate for record in records if not record.failed and (rate := record.tokens_per_s)]
            if len(rates) < len(records):
                return None
            found.append((median([record.ttft_s for record in records]), median(rates)))
        return found[0][0] / found[1][0], found[0][1] / found[1][1]


def rows(measured: Sequence[Measured], arms: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each cell and arm."""
    return [
        _row(cell, arm, [record for pair in measured if pair.cell == cell for record in pair.records[arm]])
        for cell in sorted({pair.cell for pair in measured})
        for arm in arms
    ]


def _row(cell: Cell, arm: str, records: Sequence[Record]) -> dict[str, Any]:
    good = [record for record in records if not record.failed]
    row: dict[str, Any] = {
        "arm": arm,
        "prompt_tokens_aim": cell.prompt_tokens,
        "concurrency": cell.concurrency,
        "requests": len(records),
        "failed": len(records) - len(good),
    }
    if not good:
        return row
    ttft_ms = [record.ttft_s * 1000 for record in good]
    gaps_ms = [gap * 1000 for record in good for gap in record.gaps_s]
    rates = [rate for record in good if (rate := record.tokens_per_s)]
    return row | {
        "prompt_tokens": round(median([record.prompt_tokens for record in good])),
        "output_tokens": round(median([record.output_tokens for record in good])),
        "ended_at_length": sum(record.finish_reason == "length" for record in good),
        "ttft_ms_p50": round(median(ttft_ms), 1),
        "ttft_ms_p95": round(percentile(ttft_ms, 0.95), 1),
        "itl_ms_p50": round(median(gaps_ms), 2) if gaps_ms else None,
        "tok_s": round(median(rates), 2) if rates else None,
    }


def summary(measured: Sequence[Measured], ours: str, theirs: str, rng: Random) -> dict[str, Any]:
    """Median ratios of pairs over all cells and in each, with 95 % intervals."""
    cells = sorted({pair.cell for pair in measured})
    return {
        **ratios(measured, ours, theirs, rng),
        "cells": [
            asdict(cell) | ratios([pair for pair in measured if pair.cell == cell], ours, theirs, rng)
            for cell in cells
        ],
        "same_text_share": same_text_share(measured, ours, theirs),
        "failed": sum(
            record.failed for pair in measured for records in pair.records.values() for record in records
        ),
    }


def ratios(measured: Sequence[Measured], ours: str, theirs: str, rng: Random) -> dict[str, Any]:
    found = [ratio for pair in measured if (ratio := pair.ratios(ours, theirs)) is not None]
    result: dict[str, Any] = {"pairs": len(found)}
    if found:
        for name, values in zip(("ttft_ratio_p50", "tok_s_ratio"), zip(*found, strict=True), strict=True):
            result |= bootstrap(values, rng).named(name)
    return result


def same_text_share(measured: Sequence[Measured], ours: str, theirs: str) -> float | None:
    """Of requests that both arms answered: how many were answered alike. None when there are none."""
    both = [
        mine.text == other.text
        for pair in measured
        for mine, other in zip(pair.records[ours], pair.records[theirs], strict=True)
        if not mine.failed and not other.failed
    ]
    return round(sum(both) / len(both), 4) if both else None
