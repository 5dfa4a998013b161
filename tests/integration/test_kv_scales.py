"""Scales from a model to an engine: what is measured is what caches hold; what layers get is the file's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.scales_child", str(tmp_path_factory.mktemp("scales"))],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_an_engine_measures_what_the_cache_of_another_implementation_holds(told: dict[str, Any]) -> None:
    assert len(told["measured"]) == 2
    for mine, theirs in zip(told["measured"], told["transformers"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_an_engine_with_an_fp8_cache_has_the_scales_of_its_file_when_its_weights_are_loaded(
    told: dict[str, Any],
) -> None:
    assert {name: pair for name, (*pair, _) in told["loaded"].items()} == told["file"]
    assert all(scale != 1.0 for pair in told["file"].values() for scale in pair)


def test_its_layers_write_with_the_rounding_backend(told: dict[str, Any]) -> None:
    assert {kind for *_, kind in told["loaded"].values()} == {"RoundedImpl"}
