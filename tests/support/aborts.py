"""Clients that leave at a chosen stage, and the account of what a system holds."""

import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from tests.support.stack import Stack, busy, eventually, processes_of

Farewell = Literal["fin", "reset"]


class Barriers:
    """The test's end of `kv_transfer.testing.holds`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def holding(self, stage: str) -> Iterator[None]:
        gate = self._folder / stage
        gate.touch()
        try:
            yield
        finally:
            gate.unlink(missing_ok=True)

    def hold(self, stage: str) -> None:
        (self._folder / stage).touch()

    def release(self, *stages: str) -> None:
        """These; without a name, all."""
        for gate in self._folder.iterdir():
            if gate.is_file() and (not stages or gate.name in stages):
                gate.unlink()

    def reached(self, stage: str) -> frozenset[str]:
        """Who has been held there since the system began."""
        folder = self._folder / f"{stage}.reached"
        return frozenset(entry.name for entry in folder.iterdir()) if folder.is_dir() else frozenset()


class Client:
    """One request on a socket of its own. It can only leave, or read until the other side closes."""

    def __init__(self, stack: Stack, body: dict[str, Any], *, label: str) -> None:
        self.label = label
        content = json.dumps(body)
        url = httpx.URL(stack.run_url)
        lines = [
            f"POST {url.raw_path.decode()} HTTP/1.1",
            f"host: {url.netloc.decode()}",
            f"authorization: Bearer {stack.api_key}",
            f"x-request-id: {label}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(content)}",
        ]
        assert url.port is not None
        self._socket = socket.create_connection((url.host, url.port), timeout=60)
        self._socket.sendall(("\r\n".join(lines) + "\r\n\r\n" + content).encode())

    def leave(self, farewell: Farewell) -> None:
        if farewell == "reset":
            linger = struct.pack("ii", 1, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._socket.close()

    def waiting(self) -> bool:
        """Nothing has come back yet."""
        return select.select([self._socket], [], [], 0)[0] == []

    def answer(self) -> bytes:
        """Everything until the other side closes, which ends the exchange."""
        parts = []
        while part := self._socket.recv(65536):
            parts.append(part)
        self._socket.close()
        return b"".join(parts)

    def status(self) -> int:
        return int(self.answer().split(b" ", 2)[1])


@dataclass(frozen=True)
class Footprint:
    """What one process holds of the operating system."""

    name: str
    descriptors: int
    threads: int
    sockets: int


def footprints(stack: Stack) -> dict[int, Footprint]:
    """By process id, of every process that the system has started."""
    found = {}
    for process in processes_of(stack.state):
        try:
            with process.oneshot():
                found[process.pid] = Footprint(
                    " ".join(process.cmdline())[:60],
                    process.num_fds(),
                    process.num_threads(),
                    len(process.net_connections("all")),
                )
        except psutil.NoSuchProcess:
            continue
    return found


SLACK = 6
"""Descriptors, threads or sockets that a process may hold beyond its baseline: connections that a client or
a peer keeps open, threads that a pool makes at its first need. A leak of one per abort is seen at the 7th."""


def grown(before: dict[int, Footprint], after: dict[int, Footprint]) -> list[str]:
    """What exceeds the baseline, in words. New processes count with all they have."""
    words = []
    for pid, now in after.items():
        was = before.get(pid)
        if was is None:
            words.append(f"new process {pid}: {now.name}")
            continue
        words += [
            f"{pid} {now.name}: {what} {getattr(was, what)} -> {getattr(now, what)}"
            for what in ("descriptors", "threads", "sockets")
            if getattr(now, what) > getattr(was, what) + SLACK
        ]
    return words


def await_idle(stack: Stack, baseline: dict[int, Footprint] | None, *, within_s: float = 10.0) -> None:
    """Everything that a request can hold is back.

    Raises:
        AssertionError: not in time; it names what is held.
    """
    end = time.monotonic() + within_s
    eventually(lambda: busy(stack.control("/status").json()), lambda held: held == [], within_s=within_s)
    if baseline is not None:
        left = max(0.1, end - time.monotonic())
        eventually(lambda: grown(baseline, footprints(stack)), lambda more: more == [], within_s=left)


def table(result: Mapping[str, Mapping[str, int]]) -> str:
    """The table of the document, from the result: stages in the order of a request's way."""
    lines = ["| stage | clients that left | everything came back |", "|---|---|---|"]
    for stage, row in reversed(result.items()):
        lines.append(f"| `{stage}` | {row['reached']} | {row['returned']} |")
    return "\n".join(lines)
