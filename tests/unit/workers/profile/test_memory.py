"""What an engine's environment must keep glibc from doing."""

import os
import subprocess
import sys

import pytest

from tests.unit.workers.profile.test_vllm_args import a_profile
from workers.api import Phase
from workers.profile.vllm_args import engine_environment

SCRIPT = """
import numpy as np, psutil
def resident():
    return psutil.Process().memory_info().rss
def group():
    return np.ones(7_370_000, np.uint8)  # five pages of SmolLM2 in float32, on their way
group()
before = resident()
held = [(group(), np.ones(9000, np.uint8)) for _ in range(12)]
small = [kept for _, kept in held]
held.clear()
print((resident() - before) // 2**20)
"""


@pytest.mark.parametrize("told", [True, False])
def test_so_told_and_only_then_glibc_gives_back_what_transfers_held(told: bool) -> None:
    environment = engine_environment(a_profile(), Phase.PREFILL, "cpu", "127.0.0.1")
    kept = {"MALLOC_MMAP_THRESHOLD_": environment["MALLOC_MMAP_THRESHOLD_"]} if told else {}
    rest = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=rest | kept, capture_output=True, text=True, check=True
    )

    assert (int(ran.stdout) < 8) == told, ran.stdout
