"""What a narrower format of decode's cache costs in accuracy, and what it brings in room and throughput.

Engines of the product itself, a prefill and a decode engine with pages going between them, in processes of
their own. Accuracy first (see `accuracy.py`), then closed loops (see `density.py`), formats in turns.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Final

import yaml

from load import accuracy, density
from load.accuracy import COMPARED, REFERENCE, Configuration, Found
from load.density import ARMS, NARROW, WIDE, Loop, Worth
from load.engine_process import TRIALS, EngineProcess, engine_process
from load.manifest import ROOT, load_average, manifest
from load.servers import ServerFailed, model_folder

PARTS: Final = ("accuracy", "throughput")
CLIENTS: Final = 16
"""At once, where only accuracy is measured."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--profile", default="smollm2-135m", help="a shipped profile's name")
    command.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--prompts", type=int, default=50, help="questions for accuracy, at most 50")
    command.add_argument("--tokens", type=int, default=48, help="of each answer, for accuracy")
    command.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    command.add_argument("--prompt-tokens", type=int, default=128, help="in a closed loop")
    command.add_argument("--output-tokens", type=int, default=64, help="in a closed loop")
    command.add_argument("--repeats", type=int, default=3, help="of the loops with bounded caches")
    command.add_argument("--threads", type=int, default=1, help="of each engine; two work at a time")
    command.add_argument("--itl-bound-ms", type=float, default=2000.0, help="of a useful token, on the whole")
    command.add_argument("--cost-per-hour", type=float, help="of the machine, for cost_per_mtok")


def run(options: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], bool]:
    """The result file's content, and whether the run is valid."""
    path = ROOT / "deploy" / "models" / f"{options.profile}.yaml"
    profile: dict[str, Any] = yaml.safe_load(path.read_text())
    header = manifest(seed=options.seed, arguments=arguments, profile=path)
    bench = Bench(options, profile)
    began = perf_counter()
    found: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    invalid: list[str] = []
    for part, measure in (("accuracy", bench.accuracy), ("throughput", bench.throughput)):
        if part in options.part:
            more, table, objections = measure()
            found |= more
            rows += table
            invalid += objections
    header |= {"load_average_during": load_average(), "measured_s": round(perf_counter() - began)}
    if invalid:
        found = dict.fromkeys(found)
    return {
        "manifest": header,
        "summary": found | {"valid": not invalid, "invalid": invalid},
        "rows": rows,
    }, not invalid


Part = tuple[dict[str, Any], list[dict[str, Any]], list[str]]
"""Summary, rows, objections."""


class Bench:
    def __init__(self, options: argparse.Namespace, profile: dict[str, Any]) -> None:
        self._options, self._profile = options, profile
        self._folder = str(model_folder(profile))
        self._rng = Random(options.seed)

    def accuracy(self) -> Part:
        prompts = chats(self._folder, accuracy.questions(self._options.prompts))
        found: dict[Configuration, Found] = {}
        with tempfile.TemporaryDirectory() as folder:
            scales = Path(folder) / "scales.json"
            _calibrate(self._options.profile, scales)
            reference = str(Path(folder) / "reference.npy")
            order = {"type": "Score", "prompts": prompts, "reference": reference, "concurrency": CLIENTS}
            order |= {"tokens": self._options.tokens}
            with self._of(REFERENCE, None) as engines:
                answers = [row["continuation"] for row in engines.ask(order)]
            for group in COMPARED:
                with self._of(group[0], scales) as engines:
                    for configuration in group:
                        if configuration.skew != 1.0:
                            engines.ask({"type": "Skew", "factor": configuration.skew})
                        found[configuration] = Found.of(engines.ask(order | {"continuations": answers}))
                        print(f"accuracy: {configuration.name}", flush=True)
        return (
            accuracy.summary(found, self._rng),
            accuracy.rows(found, self._rng),
            accuracy.objections(found, self._rng),
        )

    def _of(self, configuration: Configuration, scales: Path | None) -> AbstractContextManager[EngineProcess]:
        profile = accuracy.profile_of(self._profile, configuration, self._options.threads, scales)
        return self._engines(profile, pair=configuration.pair)

    def throughput(self) -> Part:
        options = self._options
        loops: list[Loop] = []
        with ExitStack() as life:
            arms = {arm: life.enter_context(self._pair(arm, None)) for arm in ARMS}
            tokens = {arm: each.ready["pages"] * each.ready["block_size"] for arm, each in arms.items()}
            page = {arm: each.ready["page_bytes"] for arm, each in arms.items()}
            block_size = arms[WIDE].ready["block_size"]
            for concurrency in options.concurrency:
                loops.append(self._loop(arms[WIDE], WIDE, None, concurrency))
        star = density.c_star(density.curve(loops, WIDE, None))
        sizes: dict[str, int] = {}
        wanted = len(options.concurrency)
        if star is not None:
            held = density.pages_of(options.prompt_tokens + options.output_tokens, block_size, star)
            sizes = {WIDE: held, NARROW: held * page[WIDE] // page[NARROW]}
            tried = [c for c in options.concurrency if star <= 2 * c and c <= 4 * star]
            wanted += len(tried) * len(ARMS) * options.repeats
            with ExitStack() as life:
                arms = {arm: life.enter_context(self._pair(arm, sizes[arm])) for arm in ARMS}
                for _ in range(options.repeats):
                    for concurrency in tried:
                        for arm in self._rng.sample(ARMS, len(ARMS)):
                            loops.append(self._loop(arms[arm], arm, sizes[arm], concurrency))
        worth = Worth(
            cache_gib=sizes.get(WIDE, 0) * page[WIDE] / (1 << 30),
            itl_bound_s=options.itl_bound_ms / 1000,
            cost_per_hour=options.cost_per_hour,
        )
        found = {
            "tokens_ratio": round(tokens[NARROW] / tokens[WIDE], 3),
            "cache_tokens": tokens,
            **density.summary(loops, sizes, star, worth),
        }
        return found, density.rows(loops, worth), density.objections(loops, wanted)

    def _loop(self, engines: EngineProcess, arm: str, pages: int | None, concurrency: int) -> Loop:
        options = self._options
        count = density.requests(concurrency)
        prompts = density.prompts(
            self._rng, count, options.prompt_tokens, self._profile["geometry"]["vocab_size"]
        )
        told = engines.ask(
            {
                "type": "Generate",
                "prompts": prompts,
                "tokens": options.output_tokens,
                "concurrency": concurrency,
            }
        )
        if told["tokens"] != count * options.output_tokens:
            raise ServerFailed(f"{arm} made {told['tokens']} tokens of {count * options.output_tokens}")
        if told["outcomes"] != {"shipped": count}:
            raise ServerFailed(f"{arm}: hand-offs ended {told['outcomes']}, not {count} times shipped")
        loop = Loop(
            arm=arm,
            pages=pages,
            concurrency=concurrency,
            tok_s=told["tokens"] / told["seconds"],
            preemptions=told["preemptions"],
            most_running=told["most_running"],
            itl_s=told["seconds"] * concurrency / told["tokens"],
        )
        print(f"throughput: {loop}", flush=True)
        return loop

    def _pair(self, arm: str, pages: int | None) -> AbstractContextManager[EngineProcess]:
        configuration = Configuration(arm, arm, pair=True)
        profile = accuracy.profile_of(self._profile, configuration, self._options.threads, None)
        most = max(self._options.concurrency)
        for phase in ("prefill", "decode"):
            profile[phase] |= {"max_sequences": most}
        return self._engines(profile, pair=True, pages=pages)

    def _engines(self, profile: Mapping[str, Any], **start: Any) -> AbstractContextManager[EngineProcess]:
        return engine_process(
            {"profile": profile, "model": self._folder, **start},
            threads=self._options.threads,
            cache_gib=profile["decode"]["cache_gib"],
            program=TRIALS,
        )


def chats(folder: str, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of each question as a user's message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]


def _calibrate(profile: str, out: Path) -> None:
    command = [sys.executable, "-m", "deploy.cli", "calibrate", "--profile", profile, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServerFailed(f"`phasegate calibrate` failed:\n{done.stderr[-3000:]}")
