import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from deploy.processes import MARKER, end_marked, has_ended, marked, start_bound

Launch = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def marker() -> str:
    return uuid4().hex


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts a shell script and returns when it has said that it is ready."""
    started: list[subprocess.Popen[bytes]] = []

    def start(marker: str, script: str = "") -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", f"{script}\necho ready; exec sleep 60"],
            env={**os.environ, MARKER: marker},
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def alive(process: subprocess.Popen[bytes]) -> bool:
    return psutil.pid_exists(process.pid) and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE


def test_what_carries_the_marker_is_ended_and_nothing_else(marker: str, launch: Launch) -> None:
    ours, theirs = launch(marker), launch(uuid4().hex)

    assert end_marked(marker) == [ours.pid]

    assert not alive(ours)
    assert alive(theirs)


def test_children_inherit_the_marker_and_are_ended_too(marker: str, launch: Launch) -> None:
    launch(marker, "sleep 60 & setsid sleep 60 &")

    assert len(end_marked(marker)) == 3
    assert marked(marker) == []


def test_a_process_that_ignores_the_polite_signal_is_killed(marker: str, launch: Launch) -> None:
    stubborn = launch(marker, 'trap "" TERM')

    assert end_marked(marker, grace_s=0.2) == [stubborn.pid]
    assert not alive(stubborn)


def test_a_stopped_process_is_killed(marker: str, launch: Launch) -> None:
    stopped = launch(marker)
    stopped.send_signal(signal.SIGSTOP)

    assert end_marked(marker, grace_s=0.2) == [stopped.pid]
    assert not alive(stopped)


def test_a_spared_process_lives_on(marker: str, launch: Launch) -> None:
    spared, other = launch(marker), launch(marker)

    assert end_marked(marker, spare=frozenset({spared.pid})) == [other.pid]
    assert alive(spared)


def test_the_caller_is_never_among_its_own(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    monkeypatch.setenv(MARKER, marker)

    assert os.getpid() not in {process.pid for process in marked(marker)}


def test_with_nothing_marked_nothing_is_ended(marker: str) -> None:
    assert end_marked(marker) == []


def test_a_bound_program_runs_with_its_output_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = start_bound(["/bin/sh", "-c", "echo $COLOUR; exit 7"], log=out, env={"COLOUR": "red"})

    assert process.wait(10) == 7
    assert log.read_text() == "red\n"


def test_a_process_has_ended_when_it_is_gone_or_its_parent_alone_has_not_noticed(
    launch: Launch, marker: str
) -> None:
    process = launch(marker)

    assert not has_ended(process.pid, within_s=0.05)
    process.kill()
    assert has_ended(process.pid, within_s=5)
    process.wait()
    assert has_ended(process.pid, within_s=0)
