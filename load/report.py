"""Tables of a result file, as they stand in the documents: a test compares the two."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

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


def sweep_tables(result: dict[str, Any]) -> str:
    """Markdown of one `sweep` result: a row for each loop, and in a comparison the ratios."""
    rows = [
        (
            row.get("arm", "server"),
            row["loop"],
            row["prompt_tokens_aim"],
            _cell(row["concurrency"], "{}"),
            _cell(row["rate_rps"], "{:.2f}"),
            row["requests"],
            row["failed"],
            _cell(row["throughput_tok_s"], "{:.1f}"),
            _cell(row["ttft_p50_ms"], "{:.0f}"),
            _cell(row["ttft_p95_ms"], "{:.0f}"),
            _cell(row["itl_p50_ms"], "{:.0f}"),
            _cell(row["itl_p95_ms"], "{:.0f}"),
            _cell(row["e2e_p95_ms"], "{:.0f}"),
        )
        for row in result["rows"]
    ]
    head = ("arm", "loop", "prompt tokens", "at once", "per s", "requests", "failed", "tokens/s")
    tables = [_table((*head, "TTFT p50 ms", "p95", "ITL p50 ms", "p95", "whole p95 ms"), rows)]
    if against := result["summary"].get("against"):
        ratios = [
            (
                arm,
                cell["prompt_tokens_aim"],
                cell["concurrency"],
                _interval(cell, "ttft_ratio_p50"),
                _interval(cell, "throughput_ratio"),
            )
            for arm, cells in against.items()
            for cell in cells
        ]
        tables.append(
            _table(("ours over", "prompt tokens", "at once", "TTFT ratio", "tokens/s ratio"), ratios)
        )
    return "\n\n".join(tables)


def cost_tables(result: dict[str, Any]) -> str:
    """Markdown of one `gateway-cost` result: processor time by arm and by group of processes."""
    rows = [
        (
            row["streams"],
            row["arm"],
            row["windows"],
            f"{row['cpu_us_per_token']:.0f}",
            _cell(row["ttft_added_ms_p50"], "{:.1f}"),
            f"{row['itl_ms_p50']:.1f}",
            f"{row['itl_ms_p95']:.1f}",
        )
        for row in result["rows"]
    ]
    groups = sorted({name for row in result["rows"] for name in row["us_per_token_by_group"]})
    shares = [
        (row["streams"], row["arm"], *(_cell(row["us_per_token_by_group"].get(g), "{:.0f}") for g in groups))
        for row in result["rows"]
    ]
    summary = result["summary"]
    ratio = (summary["streams"], _interval(summary, "ratio_to_handle"), summary["target"])
    head = ("streams", "arm", "windows", "us per token", "TTFT added ms", "ITL p50 ms", "p95")
    return "\n\n".join(
        (
            _table(head, rows),
            _table(("streams", "us per token: arm", *groups), shares),
            _table(("streams", "token bus over handle", "at most"), [ratio]),
        )
    )


_LOSSES: Final = (
    "throughput_loss",
    "loss_beside_model",
    "p95_itl_increase",
    "null_loss_to_stock",
    "loss_to_stock",
)


def integrity_tables(result: dict[str, Any]) -> str:
    """Markdown of one `integrity-cost` result: losses by concurrency, what they come from."""
    losses = [
        (
            row["concurrency"],
            row["blocks"],
            f"{row['step_ms_p50']:.1f}",
            *(_interval(row, f"{name}_pct") for name in _LOSSES),
        )
        for row in result["rows"]
    ]
    parts = [
        (
            row["concurrency"],
            f"{row['pages_per_step']:.0f}",
            f"{row['worker_us']:.0f}",
            f"{row['scheduler_us']:.0f}",
            f"{(row['worker_us'] + row['scheduler_us']) / 200:.2f} %",
        )
        for row in result["rows"]
    ]
    head = ("at once", "blocks", "step ms", "tokens/s lost %", "beside the model %", "p95 ITL more %")
    tables = [
        _table((*head, "off, against stock %", "on, against stock %"), losses),
        _table(
            ("at once", "pages", "us beside the model", "us beside the scheduler", "of a 20 ms step"), parts
        ),
    ]
    if result["micro"]:
        alone = [(row["rows"], row["pages"], row["form"], f"{row['us']:.0f}") for row in result["micro"]]
        tables.append(_table(("rows", "pages", "the check alone", "us"), alone))
    return "\n\n".join(tables)


def formats_tables(result: dict[str, Any]) -> str:
    """Markdown of one `formats` result: accuracy by configuration, loops by format, and their curve."""
    scored = [row for row in result["rows"] if "configuration" in row]
    loops = [row for row in result["rows"] if "kv_format" in row]
    parts = []
    if scored:
        scores = [
            (
                row["configuration"],
                row["prompts"],
                _interval(row, "dlogprob", 4),
                _interval(row, "kl", 4),
                f"{row['dlogprob_first']:.4f}",
                f"{row['argmax_agrees']:.3f}",
            )
            for row in scored
        ]
        head = ("configuration", "prompts", "mean abs dlogprob", "KL", "at the first token", "argmax agrees")
        parts.append(_table(head, scores))
    if loops:
        lines = [
            (
                row["kv_format"],
                _cell(row["pages"], "{}") or "enough",
                row["concurrency"],
                row["loops"],
                f"{row['tok_s']:.1f}",
                f"{row['itl_ms']:.0f}",
                _cell(row["useful_tok_s_per_gib"], "{:.0f}"),
                _cell(row["cost_per_mtok"], "{:.2f}"),
                row["preemptions"],
                row["most_running"],
            )
            for row in loops
        ]
        first = ("cache", "pages", "at once", "loops", "tokens/s", "ms a token")
        more = ("useful tokens/s per GiB", "cost per million tokens", "preemptions", "most running")
        parts += [_table((*first, *more), lines), _chart(loops)]
    return "\n\n".join(parts)


def _chart(loops: Sequence[Mapping[str, Any]]) -> str:
    """Of the loops with bounded caches, as Mermaid draws it: a line for each format, in order of the rows."""
    by: dict[str, dict[int, float]] = {}
    for row in loops:
        if row["pages"] is not None:
            by.setdefault(row["kv_format"], {})[row["concurrency"]] = row["tok_s"]
    if not by:
        return ""
    across = sorted({concurrency for found in by.values() for concurrency in found})
    lines = [f"    line [{', '.join(f'{found[c]:.1f}' for c in across)}]" for found in by.values()]
    return "\n".join(
        (
            "```mermaid",
            "xychart-beta",
            f'    title "tokens/s in the same bytes of cache: {", ".join(by)}"',
            f'    x-axis "requests at once" [{", ".join(map(str, across))}]',
            '    y-axis "tokens/s"',
            *lines,
            "```",
        )
    )


TABLES: Final[Mapping[str, Callable[[dict[str, Any]], str]]] = {
    "formats": formats_tables,
    "path": path_tables,
    "sweep": sweep_tables,
    "gateway-cost": cost_tables,
    "integrity-cost": integrity_tables,
}
"""By the first part of a result file's name, which is the command."""


def tables_of(file: Path) -> str:
    """Of a result file under `docs/results`.

    Raises:
        KeyError: its name begins with no command that has tables.
    """
    command = max((name for name in TABLES if file.name.startswith(name)), key=len, default=file.name)
    return TABLES[command](json.loads(file.read_text()))


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _interval(cell: dict[str, Any], name: str, digits: int = 2) -> str:
    value, low, high = (f"{cell[key]:.{digits}f}" for key in (name, f"{name}_low95", f"{name}_high95"))
    return f"{value} [{low}, {high}]"


def _table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
