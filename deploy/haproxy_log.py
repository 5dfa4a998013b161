"""HAProxy's own log: one line for each request that did not end well before a gateway could say so itself.

HAProxy writes to a socket, not to a file, so that it never waits for a disk. A flood of bad requests must not
fill the disk either: beyond a rate, lines are counted and not kept.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

LINES_PER_S: Final = 50
LINE_BYTES: Final = 1024
POLL_S: Final = 0.5

STOPPED: Final = " stopped (cumulated conns:"
"""HAProxy tells of each of its proxies that it has stopped, at every reload: that is no news."""

log = logging.getLogger(__name__)


def _write(line: str) -> None:
    log.log(logging.DEBUG if STOPPED in line else logging.WARNING, line)


class HaproxyLog:
    """Takes lines from `start` to `close`, in a thread of its own."""

    def __init__(
        self,
        path: Path,
        write: Callable[[str], None] = _write,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._write = write
        self._now = now
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._closing = False
        self._second = 0
        self._written = 0
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="haproxy-log", daemon=True)

    def start(self) -> None:
        """The socket takes lines when this returns."""
        self._socket.bind(str(self._path))
        self._path.chmod(0o600)
        self._socket.settimeout(POLL_S)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._closing:
            with contextlib.suppress(TimeoutError):
                self.take(self._socket.recv(LINE_BYTES).decode(errors="replace").strip())

    def take(self, line: str) -> None:
        second = int(self._now())
        if second != self._second:
            if self._dropped:
                self._write(f"haproxy.log.dropped lines={self._dropped}")
            self._second, self._written, self._dropped = second, 0, 0
        if self._written < LINES_PER_S:
            self._written += 1
            self._write(line)
        else:
            self._dropped += 1
