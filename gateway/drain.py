"""How a gateway takes its leave: nothing new, time for what is in flight, then a word to whoever is left.

A connection that is simply cut looks to a client like an answer that ends early, under HTTP 200. So before
the cut every request that is left ends in `ShuttingDown`: as a status if nothing was sent, else as an event.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import DRAIN_RETRY_AFTER_S, ShuttingDown


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
