"""Turns SIGINT and SIGTERM into one exception while starting, and into a wake-up while serving."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequested(BaseException):
    """Somebody wants the system to stop. Not an `Exception`: nothing on the way may swallow it."""


class StopSwitch:
    """Thrown once. Later signals change nothing: stopping is bounded and must not be cut short."""

    def __init__(self) -> None:
        self._thrown = threading.Event()
        self._interrupting = False

    @property
    def thrown(self) -> bool:
        return self._thrown.is_set()

    def install(self) -> None:
        """Take both signals over. To be repeated after a library has set handlers of its own."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def check(self) -> None:
        """Raises `StopRequested` if the switch is thrown."""
        if self.thrown:
            raise StopRequested

    def wait(self, timeout_s: float) -> bool:
        """True as soon as the switch is thrown, False after the time."""
        return self._thrown.wait(timeout_s)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Inside, a signal raises `StopRequested` wherever the main thread is."""
        self._interrupting = True
        try:
            self.check()
            yield
        finally:
            self._interrupting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self.thrown
        self._thrown.set()
        if first and self._interrupting:
            raise StopRequested
