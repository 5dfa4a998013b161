"""What is measured is what caches hold; and the embedded model's ranges are those that other texts gave."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.api import WireFormat, read_scale_file

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.vllm]


def test_an_engine_measures_what_the_cache_of_another_implementation_holds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.scaled_model", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])

    assert list(told["measured"]) == [f"model.layers.{i}.self_attn.attn" for i in range(2)]
    for mine, theirs in zip(told["measured"].values(), told["transformers"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


@pytest.mark.timeout(600)
def test_the_embedded_model_has_the_ranges_that_were_measured_before(model_dir: Path, tmp_path: Path) -> None:
    """Over 40 prompts of chats and sums the largest keys of its heads were 6 to 23, its values at most 15."""
    out = tmp_path / "scales.json"
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "calibrate", "--profile", "exact", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

    file = read_scale_file(out)
    assert (file.format, len(file.layers)) == (WireFormat.FP8_E4M3, 30)
    assert file.measured is not None
    assert file.measured.tokens > 2000
    keys = [layer.k_max for layer in file.layers if layer.k_max is not None]
    values = [layer.v_max for layer in file.layers if layer.v_max is not None]
    assert min(keys) > 6
    assert 18 < max(keys) < 28
    assert 12 < max(values) < 20
    for layer in file.layers:
        assert layer.k_max is not None
        assert layer.k_max * 2 <= layer.k * 448
        assert f"{layer.name:<40}" in done.stdout
