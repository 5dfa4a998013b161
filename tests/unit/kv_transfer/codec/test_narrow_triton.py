"""The conversion kernel's tests: see `tests/support/interpreted.py`."""

from pathlib import Path

import pytest

from tests.support.interpreted import run_cases

CASES = Path(__file__).parent / "narrow_cases.py"


@pytest.mark.timeout(180)
def test_the_conversion_as_triton_interprets_it() -> None:
    told = run_cases(CASES, interpret=True, select="not gpu")

    assert "skipped" not in told
    assert int(told.split()[0]) >= 10


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_the_conversion_on_a_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    assert "skipped" not in run_cases(CASES, interpret=False, select="gpu")
