"""An HTTP surface of ours as a test sees it: raw sockets, a plain client, and what it must hold none of."""

import json
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.support.stack import eventually

LIMITS: Final[dict[str, Any]] = {
    "max_body_bytes": 200_000,
    "header_timeout_s": 3.0,
    "body_timeout_s": 3.0,
    "client_timeout_s": 3.0,
}
"""Of the systems under these checks: short, so that the checks are, and long enough for a busy machine."""


@dataclass(frozen=True)
class Surface:
    base_url: str
    account_id: str
    api_key: str
    model: str
    held: Callable[[], list[str]]
    """Requests, pages, calls in use anywhere, in words."""
    long_answer: int = 2000
    """Tokens of an answer that is still being made when a client has left."""
    flood: int = 8000
    """Tokens of an answer that no buffers on its way can hold."""

    @property
    def address(self) -> tuple[str, int]:
        parts = httpx.URL(self.base_url)
        assert parts.port is not None
        return parts.host, parts.port

    @property
    def run_path(self) -> str:
        return f"/client/v4/accounts/{self.account_id}/ai/run/{self.model}"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=30, **{"headers": self.headers, **options})

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.settimeout(20)
        return connection

    def head(self, *lines: str, method: str = "POST", path: str | None = None) -> bytes:
        first = f"{method} {path or self.run_path} HTTP/1.1"
        key = f"authorization: Bearer {self.api_key}"
        return "\r\n".join([first, "host: gateway", key, *lines]).encode() + b"\r\n\r\n"

    def request(self, **change: Any) -> bytes:
        body = json.dumps({"prompt": "Hello", "max_tokens": 2, **change}).encode()
        return self.head(f"content-length: {len(body)}") + body


@dataclass(frozen=True)
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def code(self) -> str:
        code: str = json.loads(self.body)["error"]["code"]
        return code


def answers(connection: socket.socket) -> tuple[list[Answer], bool]:
    """Every answer until the peer closes, and whether the last one was whole. Raises on a timeout."""
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return parsed(data)


def first_answer(connection: socket.socket, data: bytes = b"") -> Answer:
    """The first answer, as soon as it is whole. `data`: what was read already."""
    while not (parsed(data)[0] and parsed(data)[1]):
        part = connection.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    return parsed(data)[0][0]


def parsed(data: bytes) -> tuple[list[Answer], bool]:
    """The answers in it, and whether the last one is whole."""
    found: list[Answer] = []
    while data:
        head, separator, rest = data.partition(b"\r\n\r\n")
        if not separator:
            return found, False
        first, *lines = head.decode().split("\r\n")
        headers = [(key.lower(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]
        answer = Answer(int(first.split()[1]), headers, b"")
        if answer.status == 100:
            data = rest
            continue
        body, data, whole = _body(answer, rest)
        found.append(Answer(answer.status, headers, body))
        if not whole:
            return found, False
    return found, True


def _body(answer: Answer, rest: bytes) -> tuple[bytes, bytes, bool]:
    if answer.all("transfer-encoding") == ["chunked"]:
        body = b""
        while True:
            size, separator, rest = rest.partition(b"\r\n")
            if not separator:
                return body, b"", False
            length = int(size, 16)
            if len(rest) < length + 2:
                return body + rest, b"", False
            body, rest = body + rest[:length], rest[length + 2 :]
            if length == 0:
                return body, rest, True
    length = int((answer.all("content-length") or ["0"])[0])
    return rest[:length], rest[length:], len(rest) >= length


def exchange(surface: Surface, raw: bytes, *, close: bool = True) -> list[Answer]:
    """All answers on one connection that the server closes; with `close`, asked to by a last request."""
    if close:
        raw += surface.head("connection: close", method="GET", path="/healthz")
    with surface.connect() as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(raw)
        found, whole = answers(connection)
    assert whole, found
    return found


def nothing_is_held(surface: Surface, within_s: float = 10.0) -> None:
    eventually(surface.held, lambda held: held == [], within_s=within_s, what="free system")
