"""Where processes spend their time: py-spy's samples, counted by named stage."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from types import TracebackType
from typing import Any, Final, Self

import psutil

SAMPLES_PER_S: Final = 50
_LATE_S: Final = 30.0

STAGES: Final[tuple[tuple[str, str], ...]] = (
    ("connector", "kv_transfer/"),
    ("token bus", "workers/bus/"),
    ("token bus", "bus_receiver"),
    ("render and detokenise", "gateway/prompt/"),
    ("render and detokenise", "vllm/renderers/"),
    ("render and detokenise", "vllm/tokenizers/"),
    ("render and detokenise", "transformers/"),
    ("gateway", "gateway/"),
    ("worker", "workers/"),
    ("model", "vllm/model_executor/"),
    ("model", "vllm/v1/worker/"),
    ("model", "vllm/v1/attention/"),
    ("model", "torch/nn/"),
    ("model", "torch/_ops"),
    ("model", "vllm/_custom_ops"),
    ("engine scheduler", "vllm/v1/core/"),
    ("engine front end", "vllm/"),
    ("Ray and Serve", "ray/"),
    ("HTTP", "uvicorn/"),
    ("HTTP", "starlette/"),
    ("HTTP", "fastapi/"),
)
"""(stage, part of a file's path). A sample belongs to the innermost frame that lies in one of them."""
OTHER: Final = "other"


class SamplerMissing(Exception):
    """Stacks cannot be sampled here."""


@dataclass(frozen=True, slots=True)
class Watched:
    name: str
    pid: int


def stage(stack: str) -> str:
    """Of one line's frames, `outer (file:line);...;inner (file:line)`."""
    for frame in reversed(stack.split(";")):
        path = frame[frame.rfind("(") + 1 :]
        for name, part in STAGES:
            if part in path:
                return name
    return OTHER


def count(raw: str) -> Counter[str]:
    """Samples by stage, of py-spy's `raw` format: a stack, a blank, a count.

    Raises:
        ValueError: a line has no count.
    """
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        if line.strip():
            stack, _, samples = line.rpartition(" ")
            found[stage(stack)] += int(samples)
    return found


def rows(counts: dict[str, Counter[str]], requests: int) -> list[dict[str, Any]]:
    """Busy milliseconds per request, by process and stage, the largest first in each process.

    Args:
        requests: how many were answered while the samples were taken; above 0.
    """
    return [
        {
            "process": process,
            "stage": name,
            "busy_ms_per_request": round(n * 1000 / SAMPLES_PER_S / requests, 1),
        }
        for process, stages in counts.items()
        for name, n in stages.most_common()
    ]


def watched(name: str, pid: int) -> list[Watched]:
    """A server process and, for a replica, the engine process below it."""
    children = [child for child in psutil.Process(pid).children(recursive=True) if _is_engine(child)]
    return [Watched(name, pid), *(Watched(f"{name} engine", child.pid) for child in children)]


def _is_engine(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "EngineCore" in words or "spawn_main" in words


class Sampler:
    """py-spy on each process for a fixed time, into a folder. Ends by itself; `counts` waits for that.

    Threads that wait are not counted: the figures are busy time.
    """

    def __init__(self, processes: Sequence[Watched], folder: Path, seconds: int) -> None:
        self._processes = processes
        self._folder = folder
        self._seconds = seconds
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        tool = which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if tool is None:
            raise SamplerMissing("py-spy is not installed")
        with ExitStack() as undo:
            undo.callback(self._stop)
            for process in self._processes:
                self._running.append(
                    subprocess.Popen(
                        [
                            *(
                                tool,
                                "record",
                                "--format",
                                "raw",
                                "--nonblocking",
                                "--rate",
                                str(SAMPLES_PER_S),
                            ),
                            *("--duration", str(self._seconds), "--pid", str(process.pid)),
                            *("--output", str(self._file(process))),
                        ],
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def counts(self) -> dict[str, Counter[str]]:
        for running in self._running:
            running.wait(self._seconds + _LATE_S)
        return {
            process.name: count(self._file(process).read_text())
            for process in self._processes
            if self._file(process).exists()
        }

    def _file(self, process: Watched) -> Path:
        return self._folder / f"{process.pid}.raw"

    def _stop(self) -> None:
        for running in self._running:
            if running.poll() is None:
                running.kill()
            running.wait()
