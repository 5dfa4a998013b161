"""What the way of a token costs, from the engine to the client: processor time of all our processes.

Two arms in one running system, which differ in nothing but how tokens get from decode to the gateway: the
token bus, and the stream of a Serve call. The scripted engine makes a token for each stream every 20 ms, so
that there is no model to compute and both arms do the same work.
"""

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import aiohttp
import yaml

from load.client import REQUEST_TIMEOUT_S, Pulse, Target, session
from load.loops import opened, sender
from load.manifest import ROOT, load_average, manifest
from load.process_groups import watch_tree
from load.processor_time import ProcessorTime
from load.prompts import messages
from load.record import Record
from load.servers import Phasegate, phasegate
from load.statistics import bootstrap, median, percentile

BUS: Final = "token bus"
HANDLE: Final = "serve handle"
ARMS: Final = (BUS, HANDLE)
HEADLINE: Final = 64
RAMP_S: Final = 0.5
LEAST_ROUNDS: Final = 3
TARGET: Final = 0.6
"""The bus may cost at most this share of what the handle costs, at 64 streams."""
SERVING: Final = ("ingress", "gateway", "prefill", "decode", "redis")
LATE_MS: Final = 20.0
"""A client later than a step of the engine does not know when a token came."""
TRACED: Final = 0.01


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", default="scripted", help="a shipped profile with the scripted engine")
    command.add_argument("--streams", type=int, nargs="+", default=[16, HEADLINE])
    command.add_argument("--prompt-tokens", type=int, default=64)
    command.add_argument("--output-tokens", type=int, default=128)
    command.add_argument("--repeats", type=int, default=10, help="rounds of all arms and numbers of streams")
    command.add_argument("--budget-s", type=float, default=300.0, help="begin no round after this long")
    command.add_argument("--ingress", choices=("haproxy", "proxy"), help="default: the system's own")


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether the run is valid."""
    path = ROOT / "deploy" / "models" / f"{options.profile}.yaml"
    profile = yaml.safe_load(path.read_text())
    if profile.get("engine") != "scripted":
        raise SystemExit(f"load: error: profile {options.profile} has no scripted engine")
    header = manifest(seed=options.seed, arguments=arguments, profile=path)
    settings: dict[str, Any] = {"testing": {"handle_arm": True}, "tracing": {"sample_ratio": TRACED}}
    if options.ingress:
        settings["ingress"] = options.ingress
    header["settings"] = settings
    with phasegate(path, settings) as ours:
        return asyncio.run(_measure(options, header, ours))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One arm under so many streams, once."""

    arm: str
    streams: int
    records: tuple[Record, ...]
    cpu_s: Mapping[str, float]
    """By group of processes."""
    added_s: tuple[float, ...]
    """Of each request: its TTFT without what the engine took of it."""

    @property
    def tokens(self) -> int:
        return sum(record.output_tokens for record in self.records if not record.failed)

    @property
    def us_per_token(self) -> float:
        return sum(self.cpu_s.values()) * 1e6 / self.tokens

    @property
    def serving_us_per_token(self) -> float:
        """Of what stands in a request's way, without what watches over it."""
        return sum(self.cpu_s.get(name, 0.0) for name in SERVING) * 1e6 / self.tokens


async def _measure(
    options: argparse.Namespace, header: dict[str, Any], ours: Phasegate
) -> tuple[dict[str, Any], bool]:
    rng = Random(options.seed)
    pulse = Pulse()
    windows: list[Window] = []
    async with session() as http:
        targets = await _targets(http, ours.target)
        bench = Bench(options, ours, http, targets, rng)
        for arm in ARMS * 2:
            await bench.window(arm, 8)
        header["idle_cpu"] = await bench.idle()
        beating = asyncio.create_task(pulse.beat())
        end = time.monotonic() + options.budget_s
        try:
            for number in range(options.repeats):
                if number and time.monotonic() > end:
                    break
                for streams in rng.sample(options.streams, len(options.streams)):
                    windows += [await bench.window(arm, streams) for arm in rng.sample(ARMS, len(ARMS))]
                print(f"round {number + 1} of {options.repeats}", flush=True)
        finally:
            beating.cancel()
    header["load_average_during"] = load_average()
    header["rounds"] = len(windows) // (len(ARMS) * len(options.streams))
    invalid = objections(windows, options.output_tokens, header["rounds"], pulse.late_ms_p99)
    found = summary(windows, max(options.streams), rng)
    if invalid:
        found = dict.fromkeys(found)
    found |= {"valid": not invalid, "client_late_ms_p99": pulse.late_ms_p99, "invalid": invalid}
    return {"manifest": header, "summary": found, "rows": rows(windows)}, not invalid


class Bench:
    """The running system, and how one window of it is measured."""

    def __init__(
        self,
        options: argparse.Namespace,
        ours: Phasegate,
        http: aiohttp.ClientSession,
        targets: Mapping[str, Target],
        rng: Random,
    ) -> None:
        self._options = options
        self._ours = ours
        self._rng = rng
        self._sends = {
            arm: sender(http, target, options.output_tokens, REQUEST_TIMEOUT_S)
            for arm, target in targets.items()
        }
        status = ours.status()
        known = {row["pid"]: "gateway" for row in status["gateways"]}
        known |= {row["pid"]: row["phase"] for row in status["replicas"]}
        self._watched = watch_tree(ours.pid, known)

    async def window(self, arm: str, streams: int) -> Window:
        prompts = [messages(self._rng, self._options.prompt_tokens) for _ in range(streams)]
        starts = [RAMP_S * place / streams for place in range(streams)]
        used = ProcessorTime(self._watched, [self._ours.pid])
        records = await opened(self._sends[arm], prompts, starts)
        cpu_s = used.spent_s()
        added = await asyncio.to_thread(self._added, records)
        await asyncio.sleep(RAMP_S)
        return Window(arm=arm, streams=streams, records=records, cpu_s=cpu_s, added_s=added)

    async def idle(self, seconds: float = 3.0) -> dict[str, float]:
        """Share of a core that each group uses while nothing is asked."""
        used = ProcessorTime(self._watched, [self._ours.pid])
        await asyncio.sleep(seconds)
        return {name: round(spent / seconds, 4) for name, spent in used.spent_s().items()}

    def _added(self, records: Sequence[Record]) -> tuple[float, ...]:
        found = []
        for record in records:
            known = None if record.failed else self._ours.summary(record.request_id)
            if known is not None and known["engine_ttft_s"] is not None:
                found.append(record.chunk_s[0] - record.sent_s - known["engine_ttft_s"])
        return tuple(found)


async def _targets(http: aiohttp.ClientSession, bus: Target) -> dict[str, Target]:
    """The model's two names: the catalogue lists what comes through the handle as one more."""
    headers = {"authorization": f"Bearer {bus.api_key}"}
    async with http.get(f"{bus.base_url}/v1/models", headers=headers) as answer:
        listed = [str(model["id"]) for model in (await answer.json())["data"]]
    (other,) = [name for name in listed if name.startswith(bus.model) and name != bus.model]
    return {BUS: bus, HANDLE: Target("handle", bus.base_url, other, bus.api_key)}


def rows(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """One row for each number of streams and arm: medians over rounds."""
    found = []
    for streams, arm in sorted({(w.streams, w.arm) for w in windows}):
        mine = [w for w in windows if (w.streams, w.arm) == (streams, arm) and w.tokens]
        row: dict[str, Any] = {"streams": streams, "arm": arm, "windows": len(mine)}
        if mine:
            gaps_s = [gap for w in mine for r in w.records if not r.failed for gap in r.gaps_s]
            added_s = [added for w in mine for added in w.added_s]
            row |= {
                "cpu_us_per_token": round(median([w.us_per_token for w in mine]), 1),
                "ttft_added_ms_p50": round(median(added_s) * 1000, 2) if added_s else None,
                "itl_ms_p50": round(median(gaps_s) * 1000, 2),
                "itl_ms_p95": round(percentile(gaps_s, 0.95) * 1000, 2),
                "us_per_token_by_group": by_group(mine),
            }
        found.append(row)
    return found


def by_group(windows: Sequence[Window]) -> dict[str, float]:
    groups = sorted({name for w in windows for name in w.cpu_s})
    return {
        name: round(median([w.cpu_s.get(name, 0.0) * 1e6 / w.tokens for w in windows]), 1) for name in groups
    }


def summary(windows: Sequence[Window], streams: int, rng: Random) -> dict[str, Any]:
    """Of the highest number of streams. Ratios are of neighbours in time; with a 95 % interval."""
    by_arm = {arm: [w for w in windows if (w.streams, w.arm) == (streams, arm) and w.tokens] for arm in ARMS}
    pairs = list(zip(by_arm[BUS], by_arm[HANDLE], strict=False))
    table = {row["arm"]: row for row in rows(windows) if row["streams"] == streams}
    found: dict[str, Any] = {
        "streams": streams,
        "cpu_us_per_token": table.get(BUS, {}).get("cpu_us_per_token"),
        "cpu_us_per_token_handle": table.get(HANDLE, {}).get("cpu_us_per_token"),
        "ttft_added_ms_p50": table.get(BUS, {}).get("ttft_added_ms_p50"),
        "ttft_added_ms_p50_handle": table.get(HANDLE, {}).get("ttft_added_ms_p50"),
        "ratio_to_handle": None,
        "ratio_to_handle_low95": None,
        "ratio_to_handle_high95": None,
        "serving_ratio_to_handle": None,
        "target": TARGET,
        "target_met": None,
    }
    if pairs:
        interval = bootstrap([bus.us_per_token / handle.us_per_token for bus, handle in pairs], rng)
        serving = median([bus.serving_us_per_token / handle.serving_us_per_token for bus, handle in pairs])
        found |= interval.named("ratio_to_handle") | {
            "serving_ratio_to_handle": round(serving, 3),
            "target_met": interval.value <= TARGET,
        }
    return found


def objections(
    windows: Sequence[Window], output_tokens: int, rounds: int, late_ms: float | None
) -> list[str]:
    """Why the figures say nothing; empty when they do."""
    found = [f"{rounds} rounds; {LEAST_ROUNDS} are needed"] if rounds < LEAST_ROUNDS else []
    records = [record for window in windows for record in window.records]
    if failed := sum(record.failed for record in records):
        found.append(f"{failed} requests failed")
    if short := sum(r.output_tokens != output_tokens for r in records if not r.failed):
        found.append(f"{short} answers were not {output_tokens} tokens long")
    if late_ms is None or late_ms > LATE_MS:
        found.append(f"the client was {late_ms} ms late at the 99th percentile; {LATE_MS:g} ms allowed")
    return found
