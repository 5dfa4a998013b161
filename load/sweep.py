"""One server under rising load: closed loops of 1 to 16 clients, then open loops below its best.

With `--compare PROFILE` instead of `--url`: Phasegate and two plain vLLM servers, all up at once, in turns.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from load import capacity, contest
from load.capacity import Batch, Terms
from load.client import REQUEST_TIMEOUT_S, Pulse, Target, objections, session
from load.loops import Send, arrivals, closed, opened, sender
from load.manifest import load_average, manifest
from load.prompts import messages

SHARES: Final = (0.5, 0.8)
"""Of the best closed loop's requests per second: the rates of the open loops, unless they are given."""
LEAST_REQUESTS: Final = 4
"""In a row, below which it says nothing."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a server of the OpenAI chat API, without /v1")
    where.add_argument("--compare", metavar="PROFILE", help="a shipped profile: Phasegate next to plain vLLM")
    command.add_argument("--key", default="", help="API key")
    command.add_argument("--model", help="as the server calls it; needed with --url")
    command.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    command.add_argument("--lengths", type=int, nargs="+", default=[128], help="prompt tokens, about")
    command.add_argument("--output-tokens", type=int, default=32)
    command.add_argument("--per-client", type=int, default=4, help="requests of each client in a loop")
    command.add_argument("--loop", nargs="+", choices=("closed", "open"), default=["closed", "open"])
    command.add_argument(
        "--rates",
        type=float,
        nargs="+",
        help="open loop: requests a second (default: 0.5 and 0.8 of the best closed loop's)",
    )
    command.add_argument("--repeats", type=int, default=3, help="rounds of all loops")
    command.add_argument("--budget-s", type=float, default=700.0, help="begin no round after this long")
    command.add_argument("--timeout-s", type=float, default=REQUEST_TIMEOUT_S)
    command.add_argument("--ttft-bound-ms", type=float, default=5000.0, help="of a useful request")
    command.add_argument(
        "--itl-bound-ms", type=float, default=250.0, help="of 95%% of a useful request's gaps"
    )
    command.add_argument("--cache-gib", type=float, help="the server's cache, for useful_tok_s_per_gib")
    command.add_argument("--cost-per-hour", type=float, help="of the server, for cost_per_mtok")


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether the run is valid."""
    if options.compare:
        return contest.run(options, terms(options), arguments)
    if not options.model:
        raise SystemExit("load: error: --url needs --model")
    header = manifest(seed=options.seed, arguments=arguments, profile=None)
    return asyncio.run(_measure(options, header, Target("server", options.url, options.model, options.key)))


def terms(options: argparse.Namespace) -> Terms:
    return Terms(
        ttft_bound_s=options.ttft_bound_ms / 1000,
        itl_bound_s=options.itl_bound_ms / 1000,
        cache_gib=options.cache_gib,
        cost_per_hour=options.cost_per_hour,
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """One kind of load: a number of clients, or a rate."""

    prompt_tokens: int
    clients: int | None = None
    rate_rps: float | None = None

    @property
    def names(self) -> dict[str, Any]:
        return {
            "loop": "open" if self.clients is None else "closed",
            "prompt_tokens_aim": self.prompt_tokens,
            "concurrency": self.clients,
            "rate_rps": self.rate_rps,
        }


async def _measure(
    options: argparse.Namespace, header: dict[str, Any], target: Target
) -> tuple[dict[str, Any], bool]:
    pulse = Pulse()
    async with session() as http:
        sweep = Sweep(options, sender(http, target, options.output_tokens, options.timeout_s))
        await sweep.warm_up()
        beating = asyncio.create_task(pulse.beat())
        try:
            await sweep.run()
        finally:
            beating.cancel()
    header["load_average_during"] = load_average()
    rows = sweep.rows()
    records = [record for batches in sweep.done.values() for batch in batches for record in batch]
    invalid = verdict(rows) + objections(
        pulse.late_s,
        [record.late_s for record in records],
        min((row["ttft_p50_ms"] / 1000 for row in rows if row["ttft_p50_ms"] is not None), default=0.0),
    )
    found = capacity.headline(rows)
    summary = (capacity.withheld(found) if invalid else found) | {
        "valid": not invalid,
        "client_late_ms_p99": pulse.late_ms_p99,
        "invalid": invalid,
    }
    return {"manifest": header, "summary": summary, "rows": rows}, not invalid


class Sweep:
    """The loops of one run, and what came of them."""

    def __init__(self, options: argparse.Namespace, send: Send) -> None:
        self._options = options
        self._send = send
        self._rng = Random(options.seed)
        self.done: dict[Loop, list[Batch]] = {}

    async def warm_up(self) -> None:
        """Twice each length: first shapes are slow."""
        for length in self._options.lengths:
            await closed(self._send, [messages(self._rng, length)] * 2, 1)

    async def run(self) -> None:
        options = self._options
        end = time.monotonic() + options.budget_s
        if "closed" in options.loop or not options.rates:
            await self._rounds(
                [Loop(n, clients=c) for n in options.lengths for c in options.concurrency], end
            )
        if "open" in options.loop:
            await self._rounds([Loop(n, rate_rps=r) for n in options.lengths for r in self._rates(n)], end)

    def rows(self) -> list[dict[str, Any]]:
        return [
            loop.names | capacity.row(batches, terms(self._options)) for loop, batches in self.done.items()
        ]

    async def _rounds(self, loops: Sequence[Loop], end: float) -> None:
        """Each round has every loop once, in random order; whole rounds only, at least one."""
        for number in range(self._options.repeats):
            if number and time.monotonic() > end:
                return
            for loop in self._rng.sample(loops, len(loops)):
                self.done.setdefault(loop, []).append(await self._once(loop))
            print(f"round {number + 1} of {self._options.repeats}, {len(loops)} loops", flush=True)

    async def _once(self, loop: Loop) -> Batch:
        clients = loop.clients or max(self._options.concurrency)
        count = max(LEAST_REQUESTS, self._options.per_client * clients)
        prompts = [messages(self._rng, loop.prompt_tokens) for _ in range(count)]
        if loop.rate_rps is None:
            return await closed(self._send, prompts, clients)
        return await opened(self._send, prompts, arrivals(loop.rate_rps, count, self._rng))

    def _rates(self, length: int) -> list[float]:
        """As asked for, or shares of what the best closed loop of this length reached."""
        if self._options.rates:
            return list(self._options.rates)
        reached = [
            capacity.row(batches, terms(self._options)).get("requests_per_s", 0.0)
            for loop, batches in self.done.items()
            if loop.prompt_tokens == length
        ]
        best = max(reached, default=0.0)
        return [round(share * best, 3) for share in SHARES] if best else []


def verdict(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Failed requests are figures of a server under load, but a row without a good one measured nothing."""
    return [
        f"{row['loop']} {row['concurrency'] or row['rate_rps']}: no request was answered"
        for row in rows
        if row["failed"] == row["requests"]
    ]
