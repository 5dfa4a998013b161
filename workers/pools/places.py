"""Who is inside a replica, and how to end them from outside with a fault.

A request that is ended finds a `TimeoutError` at its next wait, as at its deadline: its own clean-up runs,
and its call returns the fault instead of an answer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from workers.api import FaultKind
from workers.engine.base import EngineFault


@dataclass(slots=True, eq=False)
class Place:
    """One request inside."""

    request_id: str
    gateway_id: str
    """Who called; empty when the call does not say."""
    limit: asyncio.Timeout | None = None
    """The deadline that the request runs under, once it does."""
    fault: EngineFault | None = None

    def under(self, limit: asyncio.Timeout) -> None:
        """From now on the request runs under this deadline."""
        self.limit = limit
        if self.fault is not None:
            limit.reschedule(asyncio.get_running_loop().time())

    def end(self, fault: EngineFault) -> None:
        """The first fault holds."""
        if self.fault is not None:
            return
        self.fault = fault
        if self.limit is not None and not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())

    def reason(self, bad: BaseException) -> BaseException:
        """What really ended the request that `bad` came out of."""
        return self.fault if self.fault is not None and isinstance(bad, TimeoutError) else bad


class Places:
    def __init__(self) -> None:
        self._inside: set[Place] = set()

    def take(self, request_id: str, gateway_id: str = "") -> Place:
        """Who takes a place gives it back."""
        place = Place(request_id, gateway_id)
        self._inside.add(place)
        return place

    def give_back(self, place: Place) -> None:
        self._inside.discard(place)

    def end(self, kind: FaultKind, detail: str, which: Callable[[Place], bool]) -> int:
        """Ends those; how many were not ended before."""
        ended = [place for place in self._inside if place.fault is None and which(place)]
        for place in ended:
            place.end(EngineFault(kind, detail))
        return len(ended)
