"""Tables of a result file, as they stand in the documents: a test compares the two."""

from collections.abc import Sequence
from typing import Any

LEAST_BUSY_MS = 5.0
"""Stages below this are noise at fifty samples a second."""


def path_tables(result: dict[str, Any]) -> str:
    """Markdown of one `path` result: latencies by arm, ratios, and where the time went if that was asked."""
    rows = [
        (
            row["arm"],
            row["prompt_tokens"],
            row["concurrency"],
            row["requests"],
            f"{row['ttft_ms_p50']:.0f}",
            f"{row['itl_ms_p50']:.0f}",
            f"{row['tok_s']:.1f}",
        )
        for row in result["rows"]
    ]
    summary = result["summary"]
    cells = [
        (
            cell["prompt_tokens"],
            cell["concurrency"],
            _interval(cell, "ttft_ratio_p50"),
            _interval(cell, "tok_s_ratio"),
        )
        for cell in summary["cells"]
    ]
    overall = ("all", "", _interval(summary, "ttft_ratio_p50"), _interval(summary, "tok_s_ratio"))
    cpu = [
        (row["arm"], row["process"], f"{row['cpu_ms_per_request']:.0f}", f"{row['ttft_ms_p50']:.0f}")
        for row in result["cpu"]
    ]
    busy = [
        (row["arm"], row["process"], row["stage"], f"{row['busy_ms_per_request']:.0f}")
        for row in result["busy"]
        if row["busy_ms_per_request"] >= LEAST_BUSY_MS
    ]
    tables = [
        _table(("arm", "prompt tokens", "at once", "requests", "TTFT ms", "ITL ms", "tokens/s"), rows),
        _table(("prompt tokens", "at once", "TTFT ratio", "tokens/s ratio"), [*cells, overall]),
    ]
    if cpu:
        tables.append(_table(("arm", "process", "processor ms per request", "TTFT ms meanwhile"), cpu))
    if busy:
        tables.append(_table(("arm", "process", "stage", "busy ms per request"), busy))
    return "\n\n".join(tables)


def _interval(cell: dict[str, Any], name: str) -> str:
    return f"{cell[name]:.2f} [{cell[f'{name}_low95']:.2f}, {cell[f'{name}_high95']:.2f}]"


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
