"""Mixed load for a given time, and what every process of the system held meanwhile."""

import itertools
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.test_answers import ask
from tests.support.aborts import Client
from tests.support.stack import Stack, processes_of

SAMPLE_EVERY_S = 5.0
WINDOW_MIN = 2.0
"""Engines give freed memory back once a minute, and fill it with holes until the next time: what they keep is
the least of any two minutes. A leak is never given back."""
MIB = 2**20


@dataclass(frozen=True)
class Known:
    """A raw prompt, and a plain engine's greedy answer to it."""

    prompt: str
    answer: str
    tokens: int


@dataclass
class Load:
    """`users` at once, each one request after the other, of every kind."""

    stack: Stack
    known: list[Known]
    seed: int
    users: int = 4
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _labels: "itertools.count[int]" = field(default_factory=itertools.count)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=self._user, args=(number, end)) for number in range(self.users)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _user(self, number: int, end: float) -> None:
        rng = random.Random(self.seed * 1000 + number)
        kinds: list[tuple[str, int, Callable[[httpx.Client, random.Random], None]]] = [
            ("whole", 3, lambda client, rng: self._answer(client, rng, stream=False)),
            ("streamed", 4, lambda client, rng: self._answer(client, rng, stream=True)),
            ("aborted", 3, self._abort),
            ("refused", 2, self._refused),
            ("long answer", 1, self._long_answer),
        ]
        names = [name for name, weight, _ in kinds for _ in range(weight)]
        calls = {name: call for name, _, call in kinds}
        with httpx.Client(headers=self.stack.headers, timeout=120) as client:
            while time.monotonic() < end:
                kind = rng.choice(names)
                try:
                    calls[kind](client, rng)
                except (AssertionError, OSError, httpx.HTTPError, ValueError) as bad:
                    self.wrong.append(f"{kind}: {type(bad).__name__}: {bad}"[:300])
                self.counts[kind] += 1

    def _answer(self, client: httpx.Client, rng: random.Random, *, stream: bool) -> None:
        known = rng.choice(self.known)
        text, tokens, _ = ask(client, self.stack, known.prompt, stream=stream)
        assert (text, tokens) == (known.answer, known.tokens), f"{len(known.prompt)} characters, got {text!r}"

    def _long_answer(self, client: httpx.Client, rng: random.Random) -> None:
        body = {"prompt": f"Story {rng.random()}", "max_tokens": 150, "temperature": 0.9}
        answer = client.post(self.stack.run_url, json=body)
        assert answer.status_code == 200, answer.text
        assert 1 <= answer.json()["result"]["usage"]["completion_tokens"] <= 150

    def _refused(self, client: httpx.Client, rng: random.Random) -> None:
        hello: dict[str, Any] = {"prompt": "Hello", "max_tokens": 1}
        change, headers, status = rng.choice(
            [
                ({"temperature": 9}, {}, 400),
                ({"prompt": "word " * 9000}, {}, 400),
                ({}, {"authorization": "Bearer nobody"}, 401),
                ({"model": "@cf/none/none"}, {}, 400),
            ]
        )
        answer = client.post(self.stack.run_url, json=hello | change, headers=headers)
        assert answer.status_code == status, answer.text

    def _abort(self, _: httpx.Client, rng: random.Random) -> None:
        body = {
            "prompt": f"{rng.random()} " * rng.choice((1, 20, 100)),
            "max_tokens": 3000,
            "temperature": 1.2,
            "stream": rng.random() < 0.5,
        }
        client = Client(self.stack, body, label=f"soak-{next(self._labels)}")
        time.sleep(rng.uniform(0, 1.5))
        client.leave(rng.choice(("fin", "reset")))


@dataclass
class Trace:
    """What one process held, over time."""

    role: str
    minutes: list[float] = field(default_factory=list)
    rss_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def kept_mib(self, after_min: float) -> list[float]:
        """The least of each whole window after the warm-up."""
        window = self.window_min(after_min)
        points = zip(self.minutes, self.rss_mib, strict=True)
        numbered = [
            (int((minute - after_min) / window), rss) for minute, rss in points if minute >= after_min
        ]
        return [min(rss for n, rss in numbered if n == number) for number in range(numbered[-1][0])]

    def window_min(self, after_min: float) -> float:
        """A short run is looked at in four parts."""
        return min(WINDOW_MIN, (self.minutes[-1] - after_min) / 4)

    def growth_mib_per_min(self, after_min: float) -> float:
        """Of what is kept, by least squares; what is in use for a while is left out."""
        kept = self.kept_mib(after_min)
        times = [number * self.window_min(after_min) for number in range(len(kept))]
        return statistics.linear_regression(times, kept).slope

    def slope_mib_per_min(self, after_min: float) -> float:
        """Of resident memory, by least squares over the samples after the warm-up."""
        points = [(m, r) for m, r in zip(self.minutes, self.rss_mib, strict=True) if m >= after_min]
        return statistics.linear_regression(*zip(*points, strict=True)).slope

    def by_minute(self) -> list[float]:
        """The first sample of each minute, the warm-up's too."""
        whole = range(int(self.minutes[-1]) + 1)
        starts = [next((p for p, m in enumerate(self.minutes) if m >= minute), None) for minute in whole]
        return [round(self.rss_mib[place], 1) for place in starts if place is not None]

    def summary(self, after_min: float) -> dict[str, Any]:
        first = next(place for place, minute in enumerate(self.minutes) if minute >= after_min)
        kept = [round(value, 1) for value in self.kept_mib(after_min)]
        return {
            "role": self.role,
            "kept_mib": kept,
            "growth_mib_per_min": round(self.growth_mib_per_min(after_min), 3),
            "slope_mib_per_min": round(self.slope_mib_per_min(after_min), 3),
            "rss_mib_by_minute": self.by_minute(),
            "descriptors": [self.descriptors[first], self.descriptors[-1]],
            "threads": [self.threads[first], self.threads[-1]],
        }


class Watch:
    """Samples every process of the system from a thread of its own."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.traces: dict[int, Trace] = {}
        self.came: list[str] = []
        """Roles of processes that were not there at the start: something died, or was started anew."""

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while True:
            for process in processes_of(self._stack.state):
                self._sample(process, (time.monotonic() - began) / 60)
            if self._stop.wait(SAMPLE_EVERY_S):
                return

    def _sample(self, process: psutil.Process, minute: float) -> None:
        try:
            with process.oneshot():
                rss, descriptors = process.memory_info().rss / MIB, process.num_fds()
                threads = process.num_threads()
                if process.pid not in self.traces:
                    self.traces[process.pid] = Trace(role_of(process))
                    if minute > 0.5:
                        self.came.append(self.traces[process.pid].role)
        except psutil.NoSuchProcess:
            return
        trace = self.traces[process.pid]
        trace.minutes.append(minute)
        trace.rss_mib.append(rss)
        trace.descriptors.append(descriptors)
        trace.threads.append(threads)


def role_of(process: psutil.Process) -> str:
    """What a process is to the system, without any path of this machine."""
    words = process.cmdline()
    line = " ".join(words)
    if words and words[0].startswith("ray::"):
        return words[0].removeprefix("ray::").split(".")[0]
    if "spawn_main" in line or line.startswith("VLLM::"):
        parent = process.parent()
        return f"engine of {role_of(parent)}" if parent is not None else "engine"
    if "-m" in words:
        return words[words.index("-m") + 1]
    scripts = [Path(word).name for word in words[:3] if not word.startswith("-")]
    return " ".join(scripts[:2])[:60]


def report(load: Load, watch: Watch, minutes: float, warm_min: float, bound: float) -> dict[str, Any]:
    return {
        "minutes": minutes,
        "users": load.users,
        "seed": load.seed,
        "requests": dict(sorted(load.counts.items())),
        "wrong": load.wrong,
        "warm_up_minutes": warm_min,
        "growth_bound_mib_per_min": bound,
        "processes": sorted(
            (trace.summary(warm_min) for trace in watch.traces.values() if trace.minutes[-1] > warm_min),
            key=lambda row: row["role"],
        ),
        "processes_that_came_later": watch.came,
    }


def table(result: Mapping[str, Any]) -> str:
    """The table of the document, from the result."""
    first = f"MiB kept, two minutes from {result['warm_up_minutes']:g}"
    lines = [
        f"| process | {first} | last two | MiB a minute | all samples |",
        "|---|---|---|---|---|",
    ]
    for row in result["processes"]:
        kept, growth, slope = row["kept_mib"], row["growth_mib_per_min"], row["slope_mib_per_min"]
        lines.append(f"| {row['role']} | {kept[0]:.0f} | {kept[-1]:.0f} | {growth:+.2f} | {slope:+.2f} |")
    return "\n".join(lines)
