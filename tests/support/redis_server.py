"""A real Redis server for tests: own folder, own socket, nothing kept."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from deploy.redis_server import server_binary


@contextmanager
def running_redis() -> Iterator[str]:
    """The URL of a server that lives as long as the context."""
    with TemporaryDirectory(prefix="pgr") as folder:
        socket = Path(folder) / "s"
        server = subprocess.Popen(
            [
                *(str(server_binary()), "--port", "0", "--unixsocket", str(socket)),
                *("--save", "", "--appendonly", "no", "--dir", folder),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _await_answer(socket)
            yield f"unix://{socket}"
        finally:
            server.kill()
            server.wait()


def _await_answer(socket: Path) -> None:
    deadline = time.monotonic() + 10
    with redis.Redis(unix_socket_path=str(socket)) as client:
        while True:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
