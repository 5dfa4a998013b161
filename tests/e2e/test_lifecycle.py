"""Starts that are told to stop, or are killed, at every step; starts on what a killed one left; a full disk.

Afterwards nothing is left: no process, no socket, no scratch folder, nothing in shared memory.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from deploy.state import StateDir, scratch_folders
from tests.support.stack import ROOT, Stack, cli, eventually, free_port, processes_of

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(560)]

STOPS_WITHIN_S = 60.0
READY = "ready at"


@dataclass(frozen=True)
class Moment:
    """So many seconds after `up` has said a line."""

    line: str
    after_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.line} + {self.after_s:g} s"


MOMENTS = [
    Moment("model:"),
    Moment("redis: starting"),
    Moment("redis: starting", 0.3),
    Moment("ray: starting"),
    Moment("ray: starting", 1.0),
    Moment("ray: starting", 3.0),
    Moment("ray: starting", 6.0),
    Moment("waiting for", 0.0),
    Moment("waiting for", 4.0),
    Moment("waiting for engines to join the gateway"),
    Moment(READY),
    Moment(READY, 3.0),
]


class Starting:
    """An `up` in the foreground, as in a terminal: the leader of its process group."""

    def __init__(self, folder: Path) -> None:
        self.state, self._file, self._log = folder / "state", folder / "phasegate.yaml", folder / "said"
        self._file.write_text(
            yaml.safe_dump({"profile": "scripted", "port": free_port(), "internal_port": free_port()})
        )

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as out:
            words = ["up", "--config", str(self._file), "--state", str(self.state)]
            return subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", *words],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def reach(self, process: subprocess.Popen[bytes], moment: Moment) -> None:
        eventually(
            lambda: (self.said(), process.poll()),
            lambda seen: moment.line in seen[0] or seen[1] is not None,
            within_s=240,
        )
        assert process.poll() is None, self.said()
        time.sleep(moment.after_s)

    def said(self) -> str:
        return self._log.read_text()

    def left(self) -> list[str]:
        """What is still there of the system, in words."""
        names = ("local.json", "runtime.json", "gateway-secrets.json", "ray-token", "control.sock")
        return [
            *(f"process {process.pid} {process.name()}" for process in processes_of(self.state)),
            *(f"folder {folder}" for folder in scratch_folders(StateDir(self.state.resolve()))),
            *(f"file {name}" for name in names if (self.state / name).exists()),
            *(f"file {path.name}" for path in self.state.glob(".*")),
        ]


@contextmanager
def nothing_new_in(folder: Path) -> Iterator[None]:
    before = set(folder.iterdir())
    yield
    eventually(lambda: set(folder.iterdir()) - before, lambda new: not new, within_s=20)


@pytest.fixture
def starting(tmp_path: Path, model_dir: Path) -> Iterator[Starting]:
    starting = Starting(tmp_path)
    # The tests may run in the background, where both are ignored; that would be inherited.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)}
    yield starting
    for number, handler in before.items():
        signal.signal(number, handler)
    for process in processes_of(starting.state):
        process.kill()
    cli("down", "--state", str(starting.state), timeout_s=120)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_stop_at_any_moment_of_the_start_it_stops_and_leaves_nothing(
    starting: Starting, number: signal.Signals
) -> None:
    """SIGINT and SIGHUP come from the terminal, to every process of the group; SIGTERM to the one."""
    everybody = number is not signal.SIGTERM
    turn = {signal.SIGINT: 0, signal.SIGTERM: 1, signal.SIGHUP: 2}[number]
    for moment in MOMENTS[turn::3]:  # each moment once, each signal at four of them
        with nothing_new_in(Path("/dev/shm")):
            process = starting.start()
            starting.reach(process, moment)

            (os.killpg if everybody else os.kill)(process.pid, number)
            began = time.monotonic()
            code = process.wait(STOPS_WITHIN_S)

            told = f"{number.name} at {moment}: {starting.said()}"
            sys.stdout.write(f"\n{number.name} at {moment}: ended in {time.monotonic() - began:.1f} s\n")
            assert starting.left() == [], told
            assert code == (0 if moment.line == READY else 130), told
            assert starting.said().endswith("phasegate: stopped\n"), told
            assert "Traceback" not in starting.said(), told


def test_killed_at_any_moment_its_children_end_and_the_next_start_takes_over(starting: Starting) -> None:
    for moment in MOMENTS[1::2]:
        process = starting.start()
        starting.reach(process, moment)

        process.kill()
        process.wait()

        began = time.monotonic()
        eventually(lambda: processes_of(starting.state), lambda left: not left, within_s=15)
        sys.stdout.write(f"\nSIGKILL at {moment}: children ended in {time.monotonic() - began:.1f} s\n")

    process = starting.start()
    starting.reach(process, Moment(READY))
    local = json.loads((starting.state / "local.json").read_text())
    assert httpx.get(f"{local['base_url']}/readyz", timeout=10).status_code == 200
    assert len(list(scratch_folders(StateDir(starting.state.resolve())))) == 1
    process.terminate()
    assert process.wait(STOPS_WITHIN_S) == 0
    assert starting.left() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_costs_no_answer_and_is_told_by_what_needs_it(
    small_disk: Path, tmp_path: Path, model_dir: Path
) -> None:
    state, file = small_disk / "state", tmp_path / "phasegate.yaml"
    board = free_port()
    dashboard = {"host": "127.0.0.1", "port": board}
    file.write_text(
        yaml.safe_dump(
            {"profile": "scripted", "port": free_port(), "internal_port": 0, "dashboard": dashboard}
        )
    )
    words = ("--config", str(file), "--state", str(state))
    filler = small_disk / "filler"

    filler.write_bytes(bytes(200 * 1024**2))
    refused = cli("up", *words, "--detach")
    assert refused.returncode == 1
    assert "state folder: " in refused.stderr
    assert "MiB are missing" in refused.stderr
    filler.unlink()

    try:
        started = cli("up", *words, "--detach", timeout_s=280)
        assert started.returncode == 0, started.stderr
        local = json.loads((state / "local.json").read_text())
        stack = Stack(state, local["base_url"], local["account_id"], local["api_key"], local["models"][0])
        assert dashboard_status(board) == 401

        def create() -> subprocess.CompletedProcess[str]:
            return cli("key", "create", "--state", str(state))

        fill(filler)
        for _ in range(20):
            answer = httpx.post(
                stack.run_url, json={"prompt": "Hello", "max_tokens": 2}, headers=stack.headers, timeout=60
            )
            assert answer.status_code == 200, answer.text
        # Redis writes once a second: it may take a key before it knows that there is no room.
        full = eventually(create, lambda done: done.returncode != 0, within_s=30)
        filler.unlink()
        room = eventually(create, lambda done: done.returncode == 0, within_s=30)

        assert (full.returncode, "No space left" in full.stderr) == (1, True), full.stderr
        assert full.stderr.startswith("phasegate: error: Redis refuses: ")
        assert "api_key" in room.stdout
    finally:
        filler.unlink(missing_ok=True)
        down = cli("down", "--state", str(state), timeout_s=120)
    assert down.returncode == 0, down.stderr
    assert processes_of(state) == []


def dashboard_status(port: int) -> int:
    """What Ray's dashboard answers to somebody without the cluster's token."""
    return httpx.get(f"http://127.0.0.1:{port}/api/jobs/", timeout=20).status_code


def fill(file: Path) -> None:
    """Writes until there is no room left."""
    with file.open("wb", buffering=0) as out:
        for size in (1024**2, 4096, 1):
            try:
                while True:
                    out.write(bytes(size))
            except OSError:
                continue
