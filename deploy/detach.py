"""Starts a supervisor in the background and waits until it is ready or has failed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from deploy.logs import tail
from deploy.processes import importable
from deploy.state import StateDir, read_private

TIMEOUT_S: Final = 420.0
STOP_TIMEOUT_S: Final = 90.0
POLL_S: Final = 0.2


class DetachError(Exception):
    """The supervisor did not become ready. The message has its last lines."""


def start(
    arguments: Sequence[str],
    state: StateDir,
    *,
    say: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Runs `phasegate up` with these arguments in a session of its own; returns what `local.json` holds.

    Its lines are passed on as they come. If we are interrupted meanwhile, it is stopped again.

    Raises:
        DetachError: it ended, or was not ready in time (then it was stopped).
    """
    output = state.logs / "supervisor.log"
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    with os.fdopen(handle, "wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=importable({**os.environ, "PYTHONUNBUFFERED": "1"}),
        )
    told = 0
    deadline = now() + TIMEOUT_S
    try:
        while True:
            ended = child.poll()
            told = _pass_on(output, told, say)
            if ended is not None:
                last = "\n".join(tail(output))
                raise DetachError(f"phasegate did not start (exit status {ended}); its last lines:\n{last}")
            if _is_ready(state, child.pid):
                return read_private(state.local)
            if now() > deadline:
                raise DetachError(f"phasegate was not ready after {TIMEOUT_S:.0f} s: see {output}")
            sleep(POLL_S)
    except BaseException:
        _end(child)
        raise


def _is_ready(state: StateDir, pid: int) -> bool:
    """`local.json` is written last, by the process that holds the lock."""
    return state.local.exists() and state.lock.read_text().strip() == str(pid)


def _pass_on(output: Path, told: int, say: Callable[[str], None]) -> int:
    """Says the whole lines written since; returns how many there are now."""
    lines = output.read_text(errors="replace").split("\n")[:-1]
    for line in lines[told:]:
        say(line)
    return len(lines)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
