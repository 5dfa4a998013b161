"""Time-outs for calls that cannot time out by themselves (an NCCL operation waits for ever)."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Guard:
    """One guarded call."""

    def __init__(self, due: float, expire: Callable[[], None]) -> None:
        self.due = due
        self.expire = expire
        self.fired = False
        self.over = False


class Watchdog:
    """One thread that ends guarded calls which outlive their deadline."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._guards: list[tuple[float, int, Guard]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="phasegate-watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def guard(self, seconds: float, expire: Callable[[], None]) -> Iterator[Guard]:
        """Call `expire` from the watchdog's thread if the block takes longer than `seconds`."""
        guard = Guard(self._now() + seconds, expire)
        with self._changed:
            heapq.heappush(self._guards, (guard.due, next(self._order), guard))
            self._changed.notify()
        try:
            yield guard
        finally:
            with self._changed:
                guard.over = True

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._guards and self._guards[0][2].over:
                    heapq.heappop(self._guards)
                if self._stopped:
                    return
                wait = self._guards[0][0] - self._now() if self._guards else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                guard = heapq.heappop(self._guards)[2]
                guard.fired = True
            guard.expire()
