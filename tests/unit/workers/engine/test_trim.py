"""Freed memory goes back to the system."""

import subprocess
import sys
import threading

import pytest

from workers.engine.trim import EVERY_S, give_back_regularly

SCRIPT = """
import sys, numpy as np, psutil
from workers.engine.trim import give_back
def resident():
    return psutil.Process().memory_info().rss // 2**20
before = resident()
large, small = [], []
for size in range(400):
    large.append(np.ones(100_000 + 97 * size, np.uint8))
    small.append(np.ones(9_000, np.uint8))  # stays, and with it everything below
large.clear()
if sys.argv[1] == "yes":
    give_back()
print(resident() - before)
"""


@pytest.mark.parametrize("told", ["yes", "no"])
def test_holes_between_what_is_in_use_are_given_back(told: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, told], capture_output=True, text=True, check=True, cwd="."
    )

    assert (int(ran.stdout) < 15) == (told == "yes"), ran.stdout


def test_it_is_done_again_and_again() -> None:
    slept: list[float] = []
    thrice = threading.Event()
    never = threading.Event()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            thrice.set()
            never.wait()

    give_back_regularly(sleep)

    assert thrice.wait(10)
    assert slept == [EVERY_S] * 3
