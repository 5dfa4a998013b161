"""Processor time by process: what an answer costs, whoever had to wait for a core meanwhile.

Read from the kernel, so nothing is slowed down by being watched, as it is by a sampling profiler.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import psutil

from load.stacks import Watched

REST: Final = "everything else"


class ProcessorTime:
    """What each watched process, and the rest of the trees they live in, has used since the start."""

    def __init__(self, watched: Sequence[Watched], roots: Iterable[int]) -> None:
        """
        Args:
            roots: processes that the server started from; what lives below them and is not watched counts
                as the rest.
        """
        self._names = {process.pid: process.name for process in watched}
        self._roots = tuple(roots)
        self._before = self._read()

    def spent_s(self) -> dict[str, float]:
        """By name."""
        return spent(self._before, self._read(), self._names)

    def _read(self) -> dict[int, float]:
        pids = set(self._names)
        for root in self._roots:
            pids |= {root, *(child.pid for child in psutil.Process(root).children(recursive=True))}
        found = {}
        for pid in pids:
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[pid] = times.user + times.system
        return found


def spent(
    before: Mapping[int, float], after: Mapping[int, float], names: Mapping[int, str]
) -> dict[str, float]:
    """Seconds by name, the rest last. A new process counts from zero, one that has ended not at all."""
    found = {name: 0.0 for pid, name in names.items() if pid in after}
    for pid, seconds in after.items():
        name = names.get(pid, REST)
        found[name] = found.get(name, 0.0) + seconds - before.get(pid, 0.0)
    return found


def rows(seconds: Mapping[str, float], requests: int) -> list[dict[str, Any]]:
    """Milliseconds per request.

    Args:
        requests: how many were answered meanwhile; above 0.
    """
    return [
        {"process": name, "cpu_ms_per_request": round(spent_s * 1000 / requests, 1)}
        for name, spent_s in seconds.items()
    ]
