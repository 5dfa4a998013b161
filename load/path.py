"""The path next to one plain vLLM server: TTFT and tokens/s, both up at once, requests alternating."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import aiohttp
import yaml

from load.breakdown import Breakdown, breakdown
from load.client import Pulse, Target, ask_all, objections, session
from load.comparison import Measured, rows, summary
from load.manifest import ROOT, load_average, manifest
from load.plan import Cell, Pair, rounds
from load.prompts import messages
from load.servers import Phasegate, Plain, model_folder, phasegate, plain_vllm, wait_ready

LEAST_ROUNDS: Final = 3
OURS: Final = "phasegate"
THEIRS: Final = "vllm"
ARMS: Final = (OURS, THEIRS)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", default="exact", help="a shipped profile's name")
    command.add_argument(
        "--lengths", type=int, nargs="+", default=[64, 128, 512], help="prompt tokens, about"
    )
    command.add_argument("--concurrency", type=int, nargs="+", default=[1])
    command.add_argument("--repeats", type=int, default=8)
    command.add_argument("--output-tokens", type=int, default=32)
    command.add_argument("--budget-s", type=float, default=240.0, help="begin no round after this long")
    command.add_argument(
        "--sample-s", type=int, default=0, help="then twice so long on each server: where time goes"
    )


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether the run is valid."""
    path = ROOT / "deploy" / "models" / f"{options.profile}.yaml"
    profile: dict[str, Any] = yaml.safe_load(path.read_text())
    header = manifest(seed=options.seed, arguments=arguments, profile=path)
    with plain_vllm(profile, model_folder(profile)) as plain, phasegate(path) as ours:
        wait_ready(plain)
        return asyncio.run(_measure(options, header, ours, plain))


async def _measure(
    options: argparse.Namespace, header: dict[str, Any], ours: Phasegate, plain: Plain
) -> tuple[dict[str, Any], bool]:
    targets = {OURS: ours.target, THEIRS: plain.target}
    rng = Random(options.seed)
    cells = [Cell(n, c) for n in options.lengths for c in options.concurrency]
    plan = rounds(cells, ARMS, options.repeats, rng)
    pulse = Pulse()
    async with session() as http:
        await _warm_up(http, targets, cells, rng)
        beating = asyncio.create_task(pulse.beat())
        try:
            measured = await _rounds(http, targets, plan, options)
        finally:
            beating.cancel()
        header["load_average_during"] = load_average()
        shipped = handoffs(ours, measured)
        where = Breakdown()
        if options.sample_s:
            length = sorted(options.lengths)[len(options.lengths) // 2]
            where = await breakdown(http, ours, plain, length=length, seconds=options.sample_s, rng=rng)
    done = len(measured) // len(cells)
    table = rows(measured, ARMS)
    invalid = (
        verdict(table, done)
        + length_objections(measured)
        + handoff_objections(shipped)
        + client_objections(
            pulse, measured, [row["ttft_ms_p50"] / 1000 for row in table if "ttft_ms_p50" in row]
        )
    )
    header["rounds"] = done
    result = summary(measured, OURS, THEIRS, rng) | {
        "handoffs": shipped,
        "client_late_ms_p99": pulse.late_ms_p99,
        "invalid": invalid,
    }
    return {
        "manifest": header,
        "summary": result,
        "rows": table,
        "cpu": where.cpu,
        "busy": where.busy,
    }, not invalid


async def _rounds(
    http: aiohttp.ClientSession,
    targets: dict[str, Target],
    plan: Sequence[Sequence[Pair]],
    options: argparse.Namespace,
) -> list[Measured]:
    """Whole rounds only, until the budget is spent."""
    end = time.monotonic() + options.budget_s
    measured: list[Measured] = []
    for number, pairs in enumerate(plan):
        if number and time.monotonic() > end:
            break
        measured += [await _pair(http, targets, pair, options.output_tokens) for pair in pairs]
        print(f"round {number + 1} of {len(plan)}", flush=True)
    return measured


async def _pair(
    http: aiohttp.ClientSession, targets: dict[str, Target], pair: Pair, output_tokens: int
) -> Measured:
    records = {}
    for arm in pair.order:
        rng = Random(pair.prompt_seed)  # the same prompts for both
        prompts = [messages(rng, pair.cell.prompt_tokens) for _ in range(pair.cell.concurrency)]
        records[arm] = await ask_all(http, targets[arm], prompts, output_tokens)
    return Measured(pair.cell, records)


async def _warm_up(
    http: aiohttp.ClientSession, targets: dict[str, Target], cells: list[Cell], rng: Random
) -> None:
    """Twice each length, with two tokens: first shapes are slow, and links are made at their first use."""
    for length in sorted({cell.prompt_tokens for cell in cells}) * 2:
        for target in targets.values():
            await ask_all(http, target, [messages(rng, length)], 2)


def handoffs(ours: Phasegate, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """By cell, what the service itself says of its requests."""
    found = []
    for cell in sorted({pair.cell for pair in measured}):
        records = [r for pair in measured if pair.cell == cell for r in pair.records[OURS] if r.request_id]
        known = [row for record in records if (row := ours.summary(record.request_id)) is not None]
        found.append(
            {
                "prompt_tokens_aim": cell.prompt_tokens,
                "concurrency": cell.concurrency,
                "requests": len(records),
                "known": len(known),
                "shipped": sum(row["handoff"] == "shipped" for row in known),
                "cached_tokens_max": max((row["cached_tokens"] for row in known), default=None),
                "pages_p50": statistics.median(row["pages"] for row in known) if known else None,
                "wire_bytes_p50": statistics.median(row["wire_bytes"] for row in known) if known else None,
                "attempts_max": max((row["attempts"] for row in known), default=None),
            }
        )
    return found


def verdict(table: list[dict[str, Any]], rounds_done: int) -> list[str]:
    found = [f"{rounds_done} rounds; {LEAST_ROUNDS} are needed"] if rounds_done < LEAST_ROUNDS else []
    failed = sum(row["failed"] for row in table)
    return [*found, f"{failed} requests failed"] if failed else found


def length_objections(measured: Sequence[Measured]) -> list[str]:
    """Both servers must have done the same amount of work."""
    different = sum(
        mine.output_tokens != other.output_tokens or mine.prompt_tokens != other.prompt_tokens
        for pair in measured
        for mine, other in zip(pair.records[OURS], pair.records[THEIRS], strict=True)
        if not mine.failed and not other.failed
    )
    return [f"{different} requests had prompts or answers of different length"] if different else []


def handoff_objections(shipped: list[dict[str, Any]]) -> list[str]:
    """A request that met a cache, or computed everything at one engine, did not measure the path."""
    return [
        f"{row['prompt_tokens_aim']} x {row['concurrency']}: {row['shipped']} of {row['requests']} shipped "
        f"their pages, at most {row['cached_tokens_max']} tokens were cached"
        for row in shipped
        if row["shipped"] < row["requests"] or row["cached_tokens_max"]
    ]


def client_objections(pulse: Pulse, measured: Sequence[Measured], medians_s: list[float]) -> list[str]:
    records = [record for pair in measured for batch in pair.records.values() for record in batch]
    return objections(pulse.late_s, [record.late_s for record in records], min(medians_s, default=0.0))
