"""Phasegate and plain vLLM on the same cores, all up at once, loads in turns.

Three arms: ours; one plain server with all the threads that our engines have together (and their cache); one
plain server with as many threads as our prefill engine, which is what a first token can be held against.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from random import Random
from typing import Any, Final

import yaml

from load import capacity
from load.capacity import Terms
from load.client import Pulse, Target, objections, session
from load.comparison import Measured
from load.loops import closed, sender
from load.manifest import ROOT, load_average, manifest
from load.plan import Cell, rounds
from load.prompts import messages
from load.servers import model_folder, phasegate, plain_vllm, wait_ready
from load.statistics import bootstrap, median

OURS: Final = "phasegate"
SAME_CORES: Final = "vllm, all threads"
SAME_THREADS: Final = "vllm, prefill's threads"
ARMS: Final = (OURS, SAME_CORES, SAME_THREADS)
LEAST_ROUNDS: Final = 3
FLOOR: Final = 1.5
"""TTFT of one client, ours over that of the plain server with prefill's threads: at most this."""


def run(options: argparse.Namespace, terms: Terms, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    path = ROOT / "deploy" / "models" / f"{options.compare}.yaml"
    profile: dict[str, Any] = yaml.safe_load(path.read_text())
    header = manifest(seed=options.seed, arguments=arguments, profile=path)
    total = totals(profile)
    part = profile["prefill"]
    header["threads"] = dict.fromkeys((OURS, SAME_CORES), total["threads"]) | {SAME_THREADS: part["threads"]}
    caches = dict.fromkeys((OURS, SAME_CORES), total["cache_gib"]) | {SAME_THREADS: part["cache_gib"]}
    folder = model_folder(profile)
    with ExitStack() as servers:
        plain = [
            servers.enter_context(plain_vllm(profile, folder, name=SAME_CORES, **total)),
            servers.enter_context(plain_vllm(profile, folder, name=SAME_THREADS)),
        ]
        ours = servers.enter_context(phasegate(path))
        for each in plain:
            wait_ready(each)
        targets = {OURS: ours.target} | {each.target.name: each.target for each in plain}
        by_arm = {arm: replace(terms, cache_gib=float(caches[arm])) for arm in ARMS}
        return asyncio.run(measure(options, header, targets, by_arm))


def totals(profile: Mapping[str, Any]) -> dict[str, int]:
    """Threads and cache of all our engines together."""
    return {
        name: sum(profile[phase].get("replicas", 1) * profile[phase][name] for phase in ("prefill", "decode"))
        for name in ("threads", "cache_gib")
    }


async def measure(
    options: argparse.Namespace,
    header: dict[str, Any],
    targets: Mapping[str, Target],
    terms: Mapping[str, Terms],
) -> tuple[dict[str, Any], bool]:
    rng = Random(options.seed)
    cells = [Cell(n, c) for n in options.lengths for c in options.concurrency]
    pulse = Pulse()
    measured: list[Measured] = []
    async with session() as http:
        sends = {
            arm: sender(http, target, options.output_tokens, options.timeout_s)
            for arm, target in targets.items()
        }
        for length in options.lengths * 2:  # first shapes are slow, and links are made at their first use
            for send in sends.values():
                await closed(send, [messages(rng, length)], 1)
        beating = asyncio.create_task(pulse.beat())
        end = time.monotonic() + options.budget_s
        try:
            for number, pairs in enumerate(rounds(cells, ARMS, options.repeats, rng)):
                if number and time.monotonic() > end:
                    break
                for pair in pairs:
                    records = {}
                    for arm in pair.order:
                        own = Random(pair.prompt_seed)  # the same prompts for all
                        count = options.per_client * pair.cell.concurrency
                        prompts = [messages(own, pair.cell.prompt_tokens) for _ in range(count)]
                        records[arm] = await closed(sends[arm], prompts, pair.cell.concurrency)
                    measured.append(Measured(pair.cell, records))
                print(f"round {number + 1} of {options.repeats}", flush=True)
        finally:
            beating.cancel()
    header["load_average_during"] = load_average()
    header["rounds"] = len(measured) // len(cells)
    rows = table(measured, terms)
    ours = [row for row in rows if row["arm"] == OURS]
    invalid = (
        complaints(rows, header["rounds"])
        + unequal(measured)
        + objections(
            pulse.late_s,
            [r.late_s for m in measured for records in m.records.values() for r in records],
            min((row["ttft_p50_ms"] / 1000 for row in rows if row["ttft_p50_ms"] is not None), default=0.0),
        )
    )
    found = capacity.headline(ours) | {
        "against": {
            arm: [against(measured, cell, arm, rng) for cell in sorted(cells)]
            for arm in (SAME_CORES, SAME_THREADS)
        },
    }
    found["floor"] = floor(found["against"][SAME_THREADS])
    summary = (capacity.withheld(found) | {"against": None, "floor": None} if invalid else found) | {
        "valid": not invalid,
        "client_late_ms_p99": pulse.late_ms_p99,
        "invalid": invalid,
    }
    return {"manifest": header, "summary": summary, "rows": rows}, not invalid


def table(measured: Sequence[Measured], terms: Mapping[str, Terms]) -> list[dict[str, Any]]:
    """One row for each cell and arm."""
    return [
        {
            "arm": arm,
            "loop": "closed",
            "prompt_tokens_aim": cell.prompt_tokens,
            "concurrency": cell.concurrency,
            "rate_rps": None,
        }
        | capacity.row([m.records[arm] for m in measured if m.cell == cell], terms[arm])
        for cell in sorted({m.cell for m in measured})
        for arm in ARMS
    ]


def against(measured: Sequence[Measured], cell: Cell, arm: str, rng: Random) -> dict[str, Any]:
    """Ratios of ours over the arm, of the loops of one cell that had no failures; 95 % intervals."""
    found: dict[str, Any] = {"prompt_tokens_aim": cell.prompt_tokens, "concurrency": cell.concurrency}
    ttft, rate = [], []
    for each in measured:
        if each.cell != cell:
            continue
        mine, other = each.records[OURS], each.records[arm]
        if any(record.failed for record in (*mine, *other)):
            continue
        ttft.append(median([r.ttft_s for r in mine]) / median([r.ttft_s for r in other]))
        rate.append(_tokens_per_s(mine) / _tokens_per_s(other))
    found["loops"] = len(ttft)
    for name, values in (("ttft_ratio_p50", ttft), ("throughput_ratio", rate)):
        if values:
            found |= bootstrap(values, rng).named(name)
    return found


def floor(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the first token of a lone client comes soon enough, at the worst prompt length."""
    alone = [
        cell["ttft_ratio_p50"] for cell in cells if cell["concurrency"] == 1 and "ttft_ratio_p50" in cell
    ]
    worst = max(alone, default=None)
    return {"ttft_ratio_at_1": worst, "at_most": FLOOR, "met": None if worst is None else worst <= FLOOR}


def complaints(rows: Sequence[Mapping[str, Any]], rounds_done: int) -> list[str]:
    found = [f"{rounds_done} rounds; {LEAST_ROUNDS} are needed"] if rounds_done < LEAST_ROUNDS else []
    failed = sum(row["failed"] for row in rows)
    return [*found, f"{failed} requests failed"] if failed else found


def unequal(measured: Sequence[Measured]) -> list[str]:
    """All servers must have done the same amount of work."""
    different = sum(
        sorted((r.prompt_tokens, r.output_tokens) for r in m.records[OURS])
        != sorted((r.prompt_tokens, r.output_tokens) for r in m.records[arm])
        for m in measured
        for arm in (SAME_CORES, SAME_THREADS)
        if not any(r.failed for r in (*m.records[OURS], *m.records[arm]))
    )
    return [f"{different} loops had prompts or answers of different length"] if different else []


def _tokens_per_s(batch: capacity.Batch) -> float:
    return sum(record.output_tokens for record in batch) / capacity.span_s(batch)
