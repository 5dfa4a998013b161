"""Whether a replica takes work. Pure.

STARTING -> READY -> DRAINING -> STOPPED; a replica that fails to start goes straight to STOPPED.
"""

from enum import StrEnum
from typing import Final


class Stage(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


_NEXT: Final[dict[Stage, frozenset[Stage]]] = {
    Stage.STARTING: frozenset({Stage.READY, Stage.STOPPED}),
    Stage.READY: frozenset({Stage.DRAINING}),
    Stage.DRAINING: frozenset({Stage.STOPPED}),
    Stage.STOPPED: frozenset(),
}


class IllegalMove(Exception):
    """The table has no such move; the stage is unchanged."""


class Refusal(StrEnum):
    STARTING = "starting"
    BUSY = "busy"
    DRAINING = "draining"
    STOPPED = "stopped"


_REFUSAL: Final = {
    Stage.STARTING: Refusal.STARTING,
    Stage.DRAINING: Refusal.DRAINING,
    Stage.STOPPED: Refusal.STOPPED,
}


class Intake:
    """A stage, and a count of the requests inside."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._stage = Stage.STARTING
        self._inside = 0

    @property
    def stage(self) -> Stage:
        return self._stage

    @property
    def inside(self) -> int:
        return self._inside

    def move(self, to: Stage) -> None:
        if to not in _NEXT[self._stage]:
            raise IllegalMove(f"{self._stage} -> {to}")
        self._stage = to

    def enter(self) -> Refusal | None:
        """Take a request in, or say why not. Who was taken in calls `leave` once."""
        if self._stage is not Stage.READY:
            return _REFUSAL[self._stage]
        if self._inside >= self._capacity:
            return Refusal.BUSY
        self._inside += 1
        return None

    def leave(self) -> None:
        if self._inside == 0:
            raise IllegalMove("nobody is inside")
        self._inside -= 1
