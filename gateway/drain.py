"""How a gateway takes its leave: nothing new, time for what is in flight, then a word to whoever is left.

A connection that is simply cut looks to a client like an answer that ends early, under HTTP 200. So before
the cut every request that is left ends in `ShuttingDown`: as a status if nothing was sent, else as an event.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from gateway.errors import DRAIN_RETRY_AFTER_S, ShuttingDown

CUT_S: Final = 3.0
"""Until those that were told to end have sent their last words, also to a client that does not read."""

log = logging.getLogger(__name__)


class InFlight(Protocol):
    in_flight: int

    async def empty(self) -> None:
        """Return when nothing is in flight."""


class Drain:
    """OPEN -> REFUSING -> CUT; never back. Owned by one event loop."""

    def __init__(self) -> None:
        self._refusing = False
        self._cut = False
        self._inside: list[Callable[[], None]] = []

    @property
    def refusing(self) -> bool:
        return self._refusing

    def check(self) -> None:
        """Raises `ShuttingDown` when nothing new is taken."""
        if self._refusing:
            raise ShuttingDown(retry_after_s=DRAIN_RETRY_AFTER_S)

    def refuse(self) -> None:
        """Take nothing new; what is in flight goes on."""
        self._refusing = True

    def cut(self) -> int:
        """End what is in flight, and whoever gets so far later; how many were told."""
        self._refusing = self._cut = True
        told = list(self._inside)
        for tell in told:
            tell()
        return len(told)

    @contextmanager
    def inside(self, tell: Callable[[], None]) -> Iterator[None]:
        """`tell` is called at the cut, at once if it is over, unless the request ends before."""
        self._inside.append(tell)
        try:
            if self._cut:
                tell()
            yield
        finally:
            self._inside.remove(tell)


async def take_leave(drain: Drain, requests: InFlight, grace_s: float, *, refuse_new: bool) -> dict[str, int]:
    """Give requests `grace_s` to finish, end what is left, and return when nothing is in flight.

    Args:
        refuse_new: False where somebody else sees to it that nothing new comes: what was on its way when
            this gateway was told is answered, for as long as the grace lasts.

    Returns:
        How many requests were `found` in flight, and how many were `cut`.
    """
    found = requests.in_flight
    if refuse_new:
        drain.refuse()
        await _empty(requests, grace_s)
    else:
        await asyncio.sleep(grace_s)
    cut = drain.cut()
    await _empty(requests, CUT_S)
    log.info("gateway.drained found=%d cut=%d left=%d", found, cut, requests.in_flight)
    return {"found": found, "cut": cut}


async def _empty(requests: InFlight, within_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await requests.empty()
