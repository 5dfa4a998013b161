"""Processes of one system: marked in their environment, bound to their parent, never left over."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

MARKER = "PHASEGATE_STATE"
"""Environment variable that every child of a supervisor inherits."""
TERM_GRACE_S = 5.0
PR_SET_PDEATHSIG = 1


def marked(marker: str) -> list[psutil.Process]:
    """Our processes whose environment at start held this marker. The caller itself is never among them."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # not ours to read, or gone meanwhile
    return found


def end_marked(
    marker: str, *, spare: frozenset[int] = frozenset(), grace_s: float = TERM_GRACE_S
) -> list[int]:
    """Terminates, then kills, what carries the marker; returns their pids.

    A process that is stopped cannot obey SIGTERM: SIGKILL follows after `grace_s`.
    """
    ended: set[int] = set()
    for _ in range(3):
        alive = [process for process in marked(marker) if process.pid not in spare]
        if not alive:
            break
        ended.update(process.pid for process in alive)
        for process in alive:
            _signal(process, signal.SIGTERM)
        _, stubborn = psutil.wait_procs(alive, timeout=grace_s)
        for process in stubborn:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(stubborn, timeout=grace_s)
    return sorted(ended)


def has_ended(pid: int, *, within_s: float) -> bool:
    """Waits until a process is gone, or is only waiting for its parent to take note of it."""
    deadline = time.monotonic() + within_s
    while _runs(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        zombie: bool = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return not zombie


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return  # gone meanwhile, which is what was wanted


def start_bound(
    argv: Sequence[str], *, log: IO[bytes], env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel ends when this one dies, however it dies.

    Call it from the main thread: the binding is to the thread that starts the process.
    """
    own = importable({**os.environ, **(env or {})})
    return subprocess.Popen(bound(argv), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=own)


def bound(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` bound to this process. Its environment must be `importable`."""
    return [sys.executable, "-m", "deploy.processes", str(os.getpid()), *argv]


def importable(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the project's folder on the path, also where it is not installed."""
    root = str(Path(__file__).resolve().parents[1])
    return {**env, "PYTHONPATH": os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))}


def bind_to_parent(parent: int) -> None:
    """Ask the kernel to end this process with its parent, of whose pid the caller was told.

    Raises:
        SystemExit: the parent died before we could ask.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit("the parent is gone")


def main() -> None:
    """`python -m deploy.processes PARENT_PID PROGRAM ...`: bound to the parent, becomes PROGRAM."""
    parent, *argv = sys.argv[1:]
    bind_to_parent(int(parent))
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
