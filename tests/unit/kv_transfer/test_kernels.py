"""The kernels' tests, in processes of their own: Triton decides at its import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = (HERE / "integrity/kernel_cases.py", HERE / "codec/narrow_cases.py")


def run(interpret: str, select: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", select, *map(str, CASES)],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.timeout(180)
def test_the_kernels_as_triton_interprets_them() -> None:
    told = run("1", "not gpu")

    assert "skipped" not in told
    assert int(told.split()[0]) >= 24


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_kernels_on_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    assert "skipped" not in run("0", "gpu")
