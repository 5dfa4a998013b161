"""What Serve runs in place of the HAProxy program: writes our configuration, then becomes HAProxy.

Serve finds the gateway replicas and restarts HAProxy whenever they change. Its own configuration listens on
all interfaces, opens its admin socket to everybody and hides every status above 500. So the program that
Serve is given (`RAY_SERVE_HAPROXY_BINARY_PATH`) is this file: it takes from Serve's configuration the admin
socket and the replicas, and nothing else. Another Serve that words these differently is refused.

Run by its path with bare Python (`python -I -S deploy/haproxy.py SETTINGS ...`): standard library only.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template
from typing import Final

PR_SET_PDEATHSIG: Final = 1
SPARE_DESCRIPTORS: Final = 100
"""For listeners, checks, logs and the admin socket."""
REWRITE_BYTES: Final = 1024
"""Room in a buffer for the headers that HAProxy adds."""
TEMPLATE: Final = Path(__file__).with_name("haproxy.cfg")


class UnknownConfiguration(ValueError):
    """Serve's configuration is not worded as we know it: what it says must be looked at anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Written by the supervisor, read at each start of HAProxy. Durations in seconds."""

    program: str
    """The real HAProxy."""
    threads: int
    bind: str
    """Address and port for clients."""
    max_connections: int
    """Of clients at once; fewer where the system allows fewer descriptors."""
    max_requests: int
    """Connections to gateways at once, at most."""
    header_timeout_s: float
    keep_alive_s: float
    client_timeout_s: float
    max_header_bytes: int
    server_timeout_s: float
    drain_s: float
    log_socket: str
    errors: dict[str, str]
    """Bodies of HAProxy's own answers, by status."""
    retry_after_s: int


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Targets:
    """What Serve's configuration says that we need."""

    admin_socket: str
    backend: str
    servers: tuple[Server, ...]


def read_targets(text: str) -> Targets:
    """The admin socket and the replicas in Serve's configuration; no replica before one is ready.

    Raises:
        UnknownConfiguration: it has no admin socket, no frontend, or more than one application.
    """
    sockets = re.findall(r"^\s*stats socket (\S+) ", text, re.MULTILINE)
    if len(sockets) != 1:
        raise UnknownConfiguration(f"{len(sockets)} admin sockets instead of 1")
    if not re.search(r"^frontend http_frontend$", text, re.MULTILINE):
        raise UnknownConfiguration("no frontend called http_frontend")
    backends: dict[str, list[Server]] = {}
    for block in re.split(r"^(?=(?:backend|frontend|listen|defaults|global)\b)", text, flags=re.MULTILINE):
        head = re.match(r"backend (\S+)", block)
        if head and head[1] != "default_backend":
            lines = re.findall(r"^\s*server (\S+) (\S+:\d+) (.*)$", block, re.MULTILINE)
            # The fallback is a proxy that makes a client wait in silence: a clear answer is better.
            backends[head[1]] = [Server(name, at) for name, at, rest in lines if "backup" not in rest.split()]
    if len(backends) > 1:
        raise UnknownConfiguration(f"several applications: {', '.join(sorted(backends))}")
    name, servers = next(iter(backends.items()), ("none", []))
    return Targets(sockets[0], name, tuple(servers))


def render(settings: Settings, targets: Targets, template: str, descriptors: int) -> str:
    """HAProxy's configuration.

    Args:
        descriptors: how many files the process may have open.

    Raises:
        UnknownConfiguration: there are too few descriptors to serve anybody.
    """
    room = descriptors - settings.max_requests - SPARE_DESCRIPTORS
    if room < 1:
        raise UnknownConfiguration(
            f"{descriptors} open files are too few for {settings.max_requests} requests"
        )
    errors = []
    for status, body in sorted(settings.errors.items()):
        if "'" in body or "\n" in body:
            raise UnknownConfiguration(f"the body for {status} cannot be quoted")
        retry = f" hdr retry-after {settings.retry_after_s}" if status == "503" else ""
        errors.append(f"http-error status {status} content-type application/json string '{body}'{retry}")
    servers = [
        f"server {server.name} {server.address} check inter 2s fastinter 250ms downinter 250ms fall 2 rise 1 "
        "observe layer4 error-limit 3 on-error mark-down"
        for server in targets.servers
    ]
    return Template(template).substitute(
        admin_socket=targets.admin_socket,
        backend=targets.backend,
        bind=settings.bind,
        buffer_bytes=settings.max_header_bytes + REWRITE_BYTES,
        client_timeout=_milliseconds(settings.client_timeout_s),
        drain=_milliseconds(settings.drain_s),
        errors="\n    ".join(errors),
        header_timeout=_milliseconds(settings.header_timeout_s),
        keep_alive=_milliseconds(settings.keep_alive_s),
        rewrite_bytes=REWRITE_BYTES,
        log_socket=settings.log_socket,
        max_connections=min(settings.max_connections, room),
        not_found=settings.errors["404"],
        server_timeout=_milliseconds(settings.server_timeout_s),
        servers="\n    ".join(servers),
        threads=settings.threads,
    )


def _milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def write_settings(settings: Settings, path: Path) -> None:
    path.write_text(json.dumps(asdict(settings)))


def main(argv: Sequence[str]) -> None:
    """`SETTINGS -db -f CONFIG ...`: rewrites CONFIG in place and becomes HAProxy with the same arguments."""
    settings_file, *arguments = argv
    config = Path(arguments[arguments.index("-f") + 1])
    settings = Settings(**json.loads(Path(settings_file).read_text()))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    config.write_text(render(settings, read_targets(config.read_text()), TEMPLATE.read_text(), hard))
    # It goes with the actor that watches it: an orphan would hold the port against its successor.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.execv(settings.program, [settings.program, *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UnknownConfiguration as unknown:
        sys.exit(f"haproxy: {unknown}")
