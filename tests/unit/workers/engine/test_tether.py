"""A replica that is killed takes its engine process along."""

import subprocess
import sys
from pathlib import Path

import pytest

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


BARS = """
import multiprocessing, os, signal

def engine(early):
    from tqdm import tqdm
    before = set(os.listdir("/dev/shm"))
    if early:
        list(tqdm(range(2), disable=False))
    import workers.engine.tether
    list(tqdm(range(2), disable=False))
    print(sorted(set(os.listdir("/dev/shm")) - before), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    import sys
    child = multiprocessing.get_context("spawn").Process(target=engine, args=(sys.argv[1] == "early",))
    child.start()
    child.join()
"""


@pytest.mark.parametrize("bars", ["early", "late"])
def test_progress_bars_of_an_engine_that_is_killed_leave_no_semaphore(tmp_path: Path, bars: str) -> None:
    script = tmp_path / "replica.py"
    script.write_text(BARS)
    ran = subprocess.run(
        [sys.executable, str(script), bars],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        check=True,
    )

    assert ran.stdout == "[]\n", ran.stderr


def test_a_process_without_a_replica_is_tied_to_nobody() -> None:
    assert hold_to_parent() is None
