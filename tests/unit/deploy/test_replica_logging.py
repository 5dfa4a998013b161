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
from workers.profile.vllm_args import KEEP_LOGGING, engine_environment

ROOT = Path(__file__).parents[3]
SCRIPT = """
import logging, os, sys
from logging.handlers import MemoryHandler
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
for told in (True, False):
    kept = MemoryHandler(10, target=logging.FileHandler(sys.argv[1]))  # as Serve gives each replica
    logging.getLogger("ray.serve").addHandler(kept)
    configure_logging(LoggingConfig())  # as every engine and renderer does at its start
    print("kept" if kept.target else "closed")
    for name in sys.argv[2:]:
        os.environ.pop(name, None)
"""


def environments() -> dict[str, Mapping[str, str]]:
    profile = load_profile("exact", ROOT)
    engines = {phase: engine_environment(profile, phase, "cpu", "127.0.0.1") for phase in Phase}
    return {"gateway": gateway_environment(), **engines}


@pytest.mark.parametrize("replica", ["gateway", *Phase])
def test_every_replica_is_told_to_keep_log_handlers_open(replica: str) -> None:
    environment = environments()[replica]
    assert environment.items() >= KEEP_LOGGING.items()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(120)
def test_so_told_and_only_then_vllm_leaves_the_log_handlers_of_serve_open(tmp_path: Path) -> None:
    """Closed, they cost the whole system when Serve's controller is restarted: it takes no replica over."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "log"), *KEEP_LOGGING],
        cwd=ROOT,
        env={**os.environ, **KEEP_LOGGING},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ran.stdout.splitlines()[-2:] == ["kept", "closed"], ran.stdout + ran.stderr
