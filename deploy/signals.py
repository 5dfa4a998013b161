"""Turns SIGINT, SIGTERM and SIGHUP into one exception while starting, and into a wake-up while serving."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

TOLD_TO_STOP: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""What a terminal sends to every process that was started in it, not to the supervisor alone."""


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
        """Take the signals over. To be repeated after a library has set handlers of its own.

        A SIGHUP that was ignored before (`nohup`) stays ignored.
        """
        for number in TOLD_TO_STOP:
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
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

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, a signal interrupts nothing; at the end it does if one came.

        For a step that makes something and notes that it is there: half of that is a leak.
        """
        before, self._interrupting = self._interrupting, False
        try:
            yield
        finally:
            self._interrupting = before
        if before:
            self.check()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        first = not self.thrown
        self._thrown.set()
        if first and self._interrupting:
            raise StopRequested


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes started inside do not hear what the terminal sends: ending them is the supervisor's work.

    A blocked signal is inherited. It still reaches this process, through its other threads or at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
