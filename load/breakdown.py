"""Where the time to a first token goes: processor time of each process, and stages by sampled stacks.

Two windows on each server, with requests one after another that ask for one token. Nothing watches in the
first, so its times can be believed; in the second py-spy does, and competes for the cores.
"""

import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from load import processor_time, stacks
from load.client import Target, ask_all
from load.processor_time import ProcessorTime
from load.prompts import messages
from load.servers import Phasegate, Plain, ServerFailed
from load.statistics import median


@dataclass(frozen=True, slots=True)
class Breakdown:
    cpu: list[dict[str, Any]] = field(default_factory=list)
    busy: list[dict[str, Any]] = field(default_factory=list)


async def breakdown(
    http: aiohttp.ClientSession, ours: Phasegate, plain: Plain, *, length: int, seconds: int, rng: Random
) -> Breakdown:
    """
    Args:
        length: prompt tokens, about.
        seconds: of each of the four windows.

    Raises:
        ServerFailed: a server answered nothing in a window, or py-spy is missing.
    """
    found = Breakdown()
    for target, watched, root in (
        (ours.target, _ours(ours), ours.pid),
        (plain.target, stacks.watched("plain vllm", plain.pid), plain.pid),
    ):
        used = ProcessorTime(watched, [root])
        alone = await _window(http, target, length, seconds, rng)
        found.cpu.extend(alone | row for row in processor_time.rows(used.spent_s(), alone["requests"]))
        with (
            tempfile.TemporaryDirectory(prefix="load-") as folder,
            stacks.Sampler(watched, Path(folder), seconds) as sampler,
        ):
            sampled = await _window(http, target, length, seconds, rng)
            counts = await asyncio.to_thread(sampler.counts)
        found.busy.extend(sampled | row for row in stacks.rows(counts, sampled["requests"]))
    return found


def _ours(ours: Phasegate) -> list[stacks.Watched]:
    status = ours.status()
    named = [("gateway", row["pid"]) for row in status["gateways"]]
    named += [(row["phase"], row["pid"]) for row in status["replicas"]]
    return [watched for name, pid in named for watched in stacks.watched(name, pid)]


async def _window(
    http: aiohttp.ClientSession, target: Target, length: int, seconds: int, rng: Random
) -> dict[str, Any]:
    """What all rows of the window have in common."""
    end = time.monotonic() + seconds
    ttft_ms: list[float] = []
    while time.monotonic() < end:
        (record,) = await ask_all(http, target, [messages(rng, length)], 1)
        if record.failed:
            raise ServerFailed(f"{target.name}: {record.error}")
        ttft_ms.append(record.ttft_s * 1000)
    return {"arm": target.name, "requests": len(ttft_ms), "ttft_ms_p50": round(median(ttft_ms), 1)}
