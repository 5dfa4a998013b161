"""Runs a kernel's tests in a process of their own: Triton decides at its import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_cases(cases: Path, *, interpret: bool, select: str) -> str:
    """The last line that pytest says. Fails when a case does.

    Args:
        select: as `pytest -m`.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", select, str(cases)],
        env={**os.environ, "TRITON_INTERPRET": str(int(interpret))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()[-1]
