"""A TCP connection that can fall silent without closing, as when a machine or a process stops."""

import selectors
import socket
import threading
from types import TracebackType
from typing import Self


class Relay:
    """Passes bytes of one connection on, both ways, until told to stop; the connection then stays open."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._silent, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def fall_silent(self) -> None:
        self._silent.set()

    def _run(self) -> None:
        with self._listener, selectors.DefaultSelector() as ready:
            self._listener.settimeout(5)
            near, _ = self._listener.accept()
            with near, socket.create_connection(self._target) as far:
                ready.register(near, selectors.EVENT_READ, far)
                ready.register(far, selectors.EVENT_READ, near)
                while not self._over.is_set():
                    if self._silent.is_set():
                        self._over.wait(0.05)
                        continue
                    for key, _ in ready.select(0.05):
                        assert isinstance(key.fileobj, socket.socket)
                        if not (data := key.fileobj.recv(65536)):
                            return
                        key.data.sendall(data)
