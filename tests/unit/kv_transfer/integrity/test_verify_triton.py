"""The kernel's tests, in processes of their own: Triton decides at its import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "kernel_cases.py"


def run(interpret: str, select: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", select, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(180)
def test_the_kernel_as_triton_interprets_it() -> None:
    told = run("1", "not gpu")

    assert "skipped" not in told
    assert int(told.split()[0]) >= 10


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_kernel_on_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    assert "skipped" not in run("0", "gpu")
