"""What a replica's environment must keep vLLM from doing."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.app import gateway_environment
from deploy.preflight import load_profile
from workers.api import Phase
from workers.profile.vllm_args import engine_environment

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, sys
from logging.handlers import MemoryHandler
kept = MemoryHandler(10, target=logging.FileHandler(sys.argv[2]))  # as Serve gives each replica
logging.getLogger("ray.serve").addHandler(kept)
from gateway.prompt.render import VllmRenderer
VllmRenderer(sys.argv[1], 8192)
print("kept" if kept.target else "closed")
"""


def environments() -> dict[str, Mapping[str, str]]:
    profile = load_profile("exact", ROOT)
    return {
        "gateway": gateway_environment(),
        "decode": engine_environment(profile, Phase.DECODE, "cpu", "127.0.0.1"),
    }


@pytest.mark.vllm
@pytest.mark.timeout(120)
@pytest.mark.parametrize("replica", ["gateway", "decode"])
def test_vllm_leaves_the_log_handlers_of_serve_open(replica: str, model_dir: Path, tmp_path: Path) -> None:
    """Closed, they cost the whole system when Serve's controller is restarted: it takes no replica over."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model_dir), str(tmp_path / "log")],
        cwd=ROOT,
        env={**os.environ, **environments()[replica]},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ran.stdout.splitlines()[-1:] == ["kept"], ran.stdout + ran.stderr
