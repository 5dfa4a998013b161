"""A replica that is killed takes its engine process along."""

import subprocess
import sys
from pathlib import Path

from workers.engine.tether import hold_to_parent

ROOT = Path(__file__).parents[4]

REPLICA = """
import multiprocessing, os, sys, threading

def engine():
    import workers.engine.tether
    print("up", flush=True)
    threading.Event().wait()

if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=engine, daemon=True).start()
    threading.Event().wait()
"""


def test_the_engine_process_ends_when_its_replica_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    environment = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as replica:
        assert replica.stdout is not None
        assert replica.stdout.readline() == "up\n"
        replica.kill()
        # The engine holds the other end: this returns only when it is gone too.
        assert replica.stdout.read() == ""


def test_a_process_without_a_replica_is_tied_to_nobody() -> None:
    assert hold_to_parent() is None
