"""`python -m load path`: what the split path costs next to one plain vLLM engine.

Both systems are up at the same time and requests alternate between them in seeded random order, one at a
time, so that a ratio is measured in one run on one machine. Every prompt is new: nothing is a cache hit.
What would invalidate a run: other work on the cores (see `load_average` before and after), failed
requests (the run is then invalid and exits with 1), an answer shorter than asked (shown in the rows).
"""

import os
import socket
import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx

from load.client import Record, Target, chat
from load.manifest import manifest
from load.servers import phasegate, plain_vllm
from load.statistics import ratio_of_medians

WORDS = (
    *("river", "stone", "market", "window", "garden", "letter", "winter"),
    *("bridge", "silver", "engine", "harbour", "candle", "forest"),
)
DTYPES = {"exact": "float32", "smollm2-135m": "bfloat16"}
CONTEXT, BLOCK, PREFILL_THREADS = 8192, 32, 1
WARM_UP = 2


def run(options: Namespace) -> tuple[dict[str, Any], bool]:
    """The result document, and whether the run is valid."""
    rng = Random(options.seed)
    settings: dict[str, Any] = {"plain_threads": PREFILL_THREADS}
    settings |= {name: getattr(options, name) for name in ("profile", "words", "max_tokens", "rounds")}
    about = manifest(seed=options.seed, settings=settings)
    with (
        tempfile.TemporaryDirectory(prefix="phasegate-load-") as name,
        phasegate(Path(name), profile=options.profile, port=_free_port()) as (ours, _),
        plain_vllm(
            Path(name),
            model_dir=options.model_dir,
            dtype=DTYPES[options.profile],
            context=CONTEXT,
            block_size=BLOCK,
            threads=PREFILL_THREADS,
            port=_free_port(),
        ) as plain,
        httpx.Client(timeout=180, trust_env=False) as client,
    ):
        records = _measure(client, (ours, plain), options, rng)
    about["load_average_after"] = os.getloadavg()
    failed = [record for found in records.values() for record in found if record.error]
    rows = [_row(words, target, found) for (words, target), found in sorted(records.items())]
    summary: dict[str, Any] = {"failed": len(failed)}
    if not failed:
        summary |= _summary(records, options.words, rng)
    return {"manifest": about, "summary": summary, "rows": rows}, not failed


Records = dict[tuple[int, str], list[Record]]


def _measure(
    client: httpx.Client, targets: tuple[Target, Target], options: Namespace, rng: Random
) -> Records:
    for target in targets:
        for _ in range(WARM_UP):
            chat(client, target, _prompt(rng, 8), max_tokens=4)
    plan = [(words, target) for words in options.words for target in targets for _ in range(options.rounds)]
    rng.shuffle(plan)
    records: Records = {}
    for words, target in plan:
        record = chat(client, target, _prompt(rng, words), max_tokens=options.max_tokens)
        records.setdefault((words, target.name), []).append(record)
    return records


def _prompt(rng: Random, words: int) -> str:
    """Begins with a number of its own, so that no two prompts share a page."""
    return (
        f"{rng.getrandbits(48)} "
        + " ".join(rng.choices(WORDS, k=words))
        + ". Tell a long story with these words."
    )


def _row(words: int, target: str, records: list[Record]) -> dict[str, Any]:
    good = [record for record in records if not record.error]
    row: dict[str, Any] = {
        "target": target,
        "words": words,
        "requests": len(records),
        "errors": [record.error for record in records if record.error],
    }
    if good:
        row |= {
            "prompt_tokens": median(record.prompt_tokens for record in good),
            "output_tokens": median(record.output_tokens for record in good),
            "ttft_ms": round(median(record.ttft_s for record in good) * 1e3, 1),
            "tokens_per_s": round(median(record.tokens_per_s for record in good), 2),
        }
    return row


def _summary(records: Records, sizes: list[int], rng: Random) -> dict[str, Any]:
    """Per prompt size, ours over plain. Slower is above 1 for TTFT, below 1 for tokens per second."""
    summary: dict[str, Any] = {}
    for words in sizes:
        ours, plain = records[words, "phasegate"], records[words, "plain"]
        summary[f"ttft_ratio_{words}_words"] = asdict(
            ratio_of_medians([r.ttft_s for r in ours], [r.ttft_s for r in plain], rng)
        )
        summary[f"tokens_per_s_ratio_{words}_words"] = asdict(
            ratio_of_medians([r.tokens_per_s for r in ours], [r.tokens_per_s for r in plain], rng)
        )
    return summary


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
