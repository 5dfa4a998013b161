"""What page integrity costs: one engine, whose ledger comes and goes every few steps in random order.

Arms alternate inside one engine, in pairs of neighbouring blocks of decode steps, one with the ledger and one
with nothing of it in the engine: what slows the machine meets both. Decode steps only: they are the shortest.
Neighbours on a shared machine make the model's own computation faster and slower by more than a ledger could:
the loss is also taken from all of a step but that computation, which both arms run alike.
A plain vLLM engine, without a connector, takes its turns in a process of its own.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any, Final

import yaml

from load.engine_process import EngineProcess, engine_process
from load.manifest import ROOT, load_average, manifest
from load.servers import model_folder
from load.statistics import bootstrap, median, percentile

ON: Final = "generation"
OFF: Final = "null"
STOCK: Final = "stock"
LEAST_ROUNDS: Final = 3
MEDIAN_TARGET_PCT: Final = 0.4
UPPER_TARGET_PCT: Final = 1.0
STEP_MS: Final = 20.0
MICRO: Final = {"rows": 256, "pages": 4096}
UNMEASURED_STEPS: Final = 2
"""Before each block: see `kv_transfer/testing/cost.py`."""
PLAN_STEPS: Final = 100
PLAN_PAIRS: Final = 10


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", default="exact", help="a shipped profile's name")
    command.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    command.add_argument("--steps", type=int, default=16, help="decode steps in a block")
    command.add_argument("--blocks", type=int, default=2000, help="of both arms, over all concurrencies")
    command.add_argument("--rounds", type=int, default=30, help="in which each arm gets its turn")
    command.add_argument("--prompt-tokens", type=int, default=64)
    command.add_argument("--budget-s", type=float, default=1000.0, help="fewer blocks, so that rounds fit in")
    command.add_argument("--layers", type=int, help="a smaller model: its first layers, with random weights")
    command.add_argument("--micro", action="store_true", help="the check alone too, 256 rows x 4,096 pages")


@dataclass(frozen=True, slots=True)
class Block:
    """Of decode steps in one arm."""

    arm: str
    step_s: tuple[float, ...]
    model_s: float
    """Of all steps: the model's own computation."""
    tokens: int
    worker_s: float
    checked: int
    unchecked: int
    pages: int

    @property
    def tok_s(self) -> float:
        return self.tokens / sum(self.step_s)

    @property
    def beside_s(self) -> float:
        """Of a step: everything but the model's own computation."""
        return (sum(self.step_s) - self.model_s) / len(self.step_s)

    @property
    def itl_p95_s(self) -> float:
        return percentile(self.step_s, 0.95)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one visit to each engine brought, at one concurrency."""

    concurrency: int
    blocks: tuple[Block, ...]
    """Two by two."""
    stock: tuple[Block, ...]

    @property
    def pairs(self) -> list[dict[str, Block]]:
        return [{b.arm: b for b in self.blocks[i : i + 2]} for i in range(0, len(self.blocks), 2)]

    @property
    def tokens_expected(self) -> int:
        return sum(len(block.step_s) for block in (*self.blocks, *self.stock)) * self.concurrency

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in (*self.blocks, *self.stock))


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether the run is valid."""
    path = ROOT / "deploy" / "models" / f"{options.profile}.yaml"
    profile: dict[str, Any] = yaml.safe_load(path.read_text())
    header = manifest(seed=options.seed, arguments=arguments, profile=path)
    most = math.ceil(options.blocks / 2 / options.rounds / len(options.concurrency))
    start = {
        "model": str(model_folder(profile)),
        "dtype": profile["decode"]["dtype"],
        "block_size": profile["block_size"],
        "concurrency": max(options.concurrency),
        "length": options.prompt_tokens
        + max(PLAN_STEPS + 8, (2 * most + 2) * (options.steps + UNMEASURED_STEPS)),
        "layers": options.layers,
    }
    room = {"threads": profile["decode"]["threads"], "cache_gib": profile["decode"]["cache_gib"]}
    with (
        engine_process(start | {"stock": False}, **room) as ours,
        engine_process(start | {"stock": True}, **room) as stock,
    ):
        return Bench(options, ours, stock, most).measure(header)


class Bench:
    def __init__(
        self, options: argparse.Namespace, ours: EngineProcess, stock: EngineProcess, most: int
    ) -> None:
        """
        Args:
            most: pairs in a turn.
        """
        self._options, self._most = options, most
        self._ours, self._stock = ours, stock
        self._rng = Random(options.seed)

    def measure(self, header: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        began = perf_counter()
        pairs = self._pairs_that_fit()
        turns: list[Turn] = []
        rounds = 0
        while rounds < self._options.rounds and perf_counter() - began < self._options.budget_s:
            for concurrency in self._rng.sample(self._options.concurrency, len(self._options.concurrency)):
                turns.append(self._turn(concurrency, pairs))
            rounds += 1
            print(f"round {rounds} of {self._options.rounds}", flush=True)
        scheduler_us = {c: self._scheduler_us(c) for c in self._options.concurrency}
        micro = self._ours.ask({"type": "Micro", "block_size": 32, **MICRO}) if self._options.micro else []
        header |= {
            "load_average_during": load_average(),
            "rounds": rounds,
            "pairs_in_a_turn": pairs,
            "measured_s": round(perf_counter() - began),
        }
        table = rows(turns, scheduler_us, self._rng)
        invalid = objections(turns, rounds)
        found = summary(table, turns) if turns else {}
        if invalid:
            found = dict.fromkeys(found)
        if micro:
            found["micro_us"] = {row["form"]: row["us"] for row in micro}
        found |= {"layers": self._options.layers, "valid": not invalid, "invalid": invalid}
        return {"manifest": header, "summary": found, "rows": table, "micro": micro}, not invalid

    def _pairs_that_fit(self) -> int:
        """In a turn, so that all rounds end within the budget; found out when the engines are warm."""
        spent = 0.0
        for concurrency in self._options.concurrency:
            self._turn(concurrency, 1)
            began = perf_counter()
            self._turn(concurrency, 1)
            spent += (perf_counter() - began) / 3  # of three blocks, one of them the plain engine's
        fitting = (self._options.budget_s / self._options.rounds / spent - 1) / 2
        return max(1, min(self._most, int(fitting)))

    def _turn(self, concurrency: int, pairs: int) -> Turn:
        arms = [arm for _ in range(pairs) for arm in self._rng.sample((ON, OFF), 2)]
        order = {
            "type": "Blocks",
            "concurrency": concurrency,
            "steps": self._options.steps,
            "prompt_tokens": self._options.prompt_tokens,
            "seed": self._rng.getrandbits(32),
        }
        turns = [(self._ours, arms), (self._stock, [STOCK])]
        found = {
            engine: tuple(_block(raw) for raw in engine.ask(order | {"arms": wanted}))
            for engine, wanted in self._rng.sample(turns, 2)
        }
        return Turn(concurrency, found[self._ours], found[self._stock])

    def _scheduler_us(self, concurrency: int) -> float:
        """Microseconds a step that the ledger adds beside the scheduler: hooks, invariants, changes."""
        arms = [arm for _ in range(PLAN_PAIRS) for arm in self._rng.sample((ON, OFF), 2)]
        times = self._ours.ask(
            {
                "type": "Plan",
                "arms": arms,
                "concurrency": concurrency,
                "steps": PLAN_STEPS,
                "prompt_tokens": self._options.prompt_tokens,
                "seed": self._rng.getrandbits(32),
            }
        )
        by_arm = {arm: median([seconds for of, seconds in times if of == arm]) for arm in (ON, OFF)}
        return (by_arm[ON] - by_arm[OFF]) * 1e6


def _block(raw: Mapping[str, Any]) -> Block:
    return Block(**{**raw, "step_s": tuple(raw["step_s"])})


def rows(turns: Sequence[Turn], scheduler_us: Mapping[int, float], rng: Random) -> list[dict[str, Any]]:
    """One for each concurrency. Losses are of neighbouring blocks, in per cent, with 95 % intervals."""
    found = []
    for concurrency in sorted({turn.concurrency for turn in turns}):
        mine = [turn for turn in turns if turn.concurrency == concurrency]
        pairs = [pair for turn in mine for pair in turn.pairs]
        on = [pair[ON] for pair in pairs]
        worker_us = 1e6 * sum(block.worker_s for block in on) / sum(block.checked for block in on)
        row: dict[str, Any] = {
            "concurrency": concurrency,
            "blocks": 2 * len(pairs),
            "step_ms_p50": round(1000 * median([s for pair in pairs for s in pair[OFF].step_s]), 2),
            "worker_us": round(worker_us, 1),
            "scheduler_us": round(scheduler_us[concurrency], 1),
            "pages_per_step": round(sum(b.pages for b in on) / sum(b.checked for b in on), 1),
        }
        loss = bootstrap([100 * (1 - pair[ON].tok_s / pair[OFF].tok_s) for pair in pairs], rng)
        later = bootstrap([100 * (pair[ON].itl_p95_s / pair[OFF].itl_p95_s - 1) for pair in pairs], rng)
        row |= loss.named("throughput_loss_pct") | later.named("p95_itl_increase_pct")
        model_s = median([block.model_s / len(block.step_s) for pair in pairs for block in pair.values()])
        beside = [100 * (1 - (model_s + p[OFF].beside_s) / (model_s + p[ON].beside_s)) for p in pairs]
        row |= {"model_ms_p50": round(1000 * model_s, 2)}
        row |= bootstrap(beside, rng).named("loss_beside_model_pct")
        # The plain engine's blocks are the first ones of fresh requests: so are these.
        for arm, name in ((ON, "loss_to_stock_pct"), (OFF, "null_loss_to_stock_pct")):
            ratios = [
                100 * (1 - turn.pairs[0][arm].tok_s / median([b.tok_s for b in turn.stock])) for turn in mine
            ]
            row |= bootstrap(ratios, rng).named(name)
        found.append(row)
    return found


def summary(table: Sequence[Mapping[str, Any]], turns: Sequence[Turn]) -> dict[str, Any]:
    """The worst of each figure over concurrencies; counts over all."""
    on = [pair[ON] for turn in turns for pair in turn.pairs]
    worst = max(table, key=lambda row: row["throughput_loss_pct"])
    check_us = max(row["worker_us"] + row["scheduler_us"] for row in table)
    median_pct = worst["throughput_loss_pct"]
    upper_pct = max(row["throughput_loss_pct_high95"] for row in table)
    beside_pct = max(row["loss_beside_model_pct"] for row in table)
    beside_upper_pct = max(row["loss_beside_model_pct_high95"] for row in table)
    return {
        "throughput_loss_pct_median": median_pct,
        "throughput_loss_pct_upper95": upper_pct,
        "worst_concurrency": worst["concurrency"],
        "target_met": median_pct < MEDIAN_TARGET_PCT and upper_pct < UPPER_TARGET_PCT,
        "loss_beside_model_pct_median": beside_pct,
        "loss_beside_model_pct_upper95": beside_upper_pct,
        "target_met_beside_model": beside_pct < MEDIAN_TARGET_PCT and beside_upper_pct < UPPER_TARGET_PCT,
        "p95_itl_increase_pct_median": max(row["p95_itl_increase_pct"] for row in table),
        "check_us_per_step": round(check_us, 1),
        "pct_of_20ms_step": round(check_us / STEP_MS / 10, 3),
        "loss_to_stock_pct_median": max(row["loss_to_stock_pct"] for row in table),
        "blocks": 2 * len(on),
        "checks": sum(block.checked for block in on),
        "pages_checked": sum(block.pages for block in on),
        "steps_unchecked": sum(block.unchecked for block in on),
    }


def objections(turns: Sequence[Turn], rounds: int) -> list[str]:
    """Why the figures say nothing; empty when they do."""
    found = [f"{rounds} rounds; {LEAST_ROUNDS} are needed"] if rounds < LEAST_ROUNDS else []
    on = [pair[ON] for turn in turns for pair in turn.pairs]
    off = [pair[OFF] for turn in turns for pair in turn.pairs]
    if unchecked := sum(len(block.step_s) - block.checked + block.unchecked for block in on):
        found.append(f"{unchecked} steps with the ledger were not checked")
    if checked := sum(block.checked for block in off):
        found.append(f"{checked} steps without the ledger were checked")
    if (tokens := sum(t.tokens for t in turns)) != (expected := sum(t.tokens_expected for t in turns)):
        found.append(f"{tokens} tokens were made, {expected} expected")
    return found
