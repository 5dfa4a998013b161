"""Watches what nobody else replaces: Redis, which it starts again, and Ray's own processes.

Serve replaces replicas, its proxy and its controller by itself. Without Ray's control service or its node
process nothing can be replaced any more: their loss ends the system, at once and by name.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol, Self

import psutil

from deploy.redis_server import RedisError, RedisServer

EVERY_S: Final = 0.2
MOST_RESTARTS: Final = 5
RESTARTS_WITHIN_S: Final = 60.0
CORE: Final = {"gcs_server": "Ray's control service", "raylet": "Ray's node process"}
"""By the name of the process: what it is."""

Say = Callable[[str], None]
log = logging.getLogger(__name__)


class PartLost(Exception):
    """The system cannot go on. The message says which part is gone, and where it said its last words."""


class ClusterLost(PartLost):
    """Ray is gone: nothing may be asked of it any more."""


class Watched(Protocol):
    def look(self) -> None:
        """Raises `PartLost` when the system cannot go on without this part."""


class RestartBudget:
    """So many restarts within so many seconds, and no more."""

    def __init__(self, most: int = MOST_RESTARTS, within_s: float = RESTARTS_WITHIN_S) -> None:
        self._most = most
        self._within_s = within_s
        self._at: deque[float] = deque()

    def take(self, now: float) -> bool:
        """Whether one more restart is allowed now; it is counted then."""
        while self._at and now - self._at[0] >= self._within_s:
            self._at.popleft()
        if len(self._at) >= self._most:
            return False
        self._at.append(now)
        return True


class RedisKeeper:
    """Holds the server, and starts it again on the same port and data when it ends by itself."""

    def __init__(
        self,
        start: Callable[[int | None], RedisServer],
        *,
        say: Say,
        budget: RestartBudget | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            start: starts the server on a port, None: on any. Returns when it answers.

        Raises:
            RedisError: it does not start.
        """
        self._start = start
        self._say = say
        self._budget = budget or RestartBudget()
        self._now = now
        self.server = start(None)

    def look(self) -> None:
        code = self.server.process.poll()
        if code is None:
            return
        how = ended_how(code)
        began = self._now()
        if not self._budget.take(began):
            raise PartLost(
                f"redis ended {MOST_RESTARTS + 1} times within {RESTARTS_WITHIN_S:.0f} s, at last {how}: "
                "see redis.log in the folder of logs"
            )
        log.error("redis.ended how=%s", how)
        self._say(f"redis ended by itself ({how}): starting it again")
        try:
            self.server = self._start(self.server.port)
        except RedisError as bad:
            raise PartLost(f"redis ended by itself ({how}) and cannot be started again: {bad}") from None
        self._say(f"redis is back after {self._now() - began:.1f} s; keys and accounts are kept")

    def stop(self) -> None:
        self.server.stop()


class Core:
    """Ray's processes among our children, by name."""

    def __init__(self, processes: Mapping[str, psutil.Process]) -> None:
        self._processes = processes

    @classmethod
    def of_this_process(cls) -> Self:
        """Those that `ray.init` has just started.

        Raises:
            ClusterLost: they are not all there.
        """
        children = {_name(process): process for process in psutil.Process().children()}
        for name, role in CORE.items():
            if name not in children:
                raise ClusterLost(f"{role} ({name}) is not running")
        return cls({name: children[name] for name in CORE})

    @property
    def complete(self) -> bool:
        """Whether all of them live."""
        return all(map(_lives, self._processes.values()))

    def look(self) -> None:
        for name, process in self._processes.items():
            if not _lives(process):
                raise ClusterLost(
                    f"{CORE[name]} ({name}, pid {process.pid}) is gone: nothing can be replaced now, the "
                    "system ends; start it again with `phasegate up`"
                )


def ended_how(code: int) -> str:
    """An exit status in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit status {code}"


def _name(process: psutil.Process) -> str:
    try:
        name: str = process.name()
    except psutil.Error:
        return ""
    return name


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
