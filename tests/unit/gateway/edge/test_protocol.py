"""The HTTP server's side of a connection, in a real server: what the list of surface checks cannot see."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn

from gateway.edge.limits import EdgeLimits
from gateway.edge.protocol import GuardedProtocol

LIMITS = EdgeLimits(header_timeout_s=0.5, client_timeout_s=5, max_header_bytes=4096)
POST = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = b"2\r\nhi\r\n"


class Server:
    """Answers with the headers that it saw."""

    port = 0
    left = 0
    """Clients that went before the end of their body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive()).get("more_body"):
            pass
        self.left += message["type"] == "http.disconnect"
        body = b" ".join(name for name, _ in scope["headers"])
        length = str(len(body)).encode()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    app, listener = Server(), socket.create_server(("127.0.0.1", 0))
    app.port = listener.getsockname()[1]
    guarded: Any = type("Guarded", (GuardedProtocol,), {"limits": LIMITS})
    config = uvicorn.Config(app, http=guarded, lifespan="off", log_config=None, timeout_keep_alive=30)
    running = uvicorn.Server(config)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    async with asyncio.timeout(5):
        while not running.started:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(0.01)
    yield app
    running.should_exit = running.force_exit = True
    await task


async def test_a_trailer_is_never_taken_for_a_header(server: Server) -> None:
    reader, writer = await server.connect()
    last = POST.replace(b"host: x", b"connection: close")
    writer.write(last + CHUNK + b"0\r\nauthorization: Bearer x\r\nx-request-id: y\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nconnection transfer-encoding")


@pytest.mark.parametrize(
    ("before", "endless"),
    [
        (POST + CHUNK + b"0\r\n", b"x: " + b"y" * 1000 + b"\r\n"),
        (POST + CHUNK + b"0\r\nx: ", b"y" * 1000),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\r\n" * 500),
    ],
    ids=["trailers", "one trailer", "blank lines"],
)
async def test_what_is_neither_header_nor_body_has_an_end_too(
    server: Server, before: bytes, endless: bytes
) -> None:
    """It would be kept in memory, or keep the connection, for as long as the client likes."""

    def takes_everything() -> bool:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            connection.sendall(before)
            with suppress(ConnectionError):
                for _ in range(0, 20_000_000, len(endless)):
                    connection.sendall(endless)
                return True
        return False

    assert not await asyncio.to_thread(takes_everything)


@pytest.mark.parametrize("rest", [b"no size\r\n", b"2\r\nlonger\r\n"])
async def test_a_body_that_cannot_be_read_on_is_refused_at_once(server: Server, rest: bytes) -> None:
    """Whoever waits for its end would wait until the body's deadline."""
    reader, writer = await server.connect()
    writer.write(POST + CHUNK)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.write(rest)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 400 ")
    assert server.left == 1


async def test_a_body_of_many_small_chunks_is_no_endless_trailer(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(POST)
    for _ in range(40):
        writer.write(CHUNK * 200)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"host transfer-encoding"), 5)
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_blank_line_after_an_answer_keeps_no_connection_open(server: Server) -> None:
    """uvicorn takes it for the beginning of a request, and stops its own clock."""
    reader, writer = await server.connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\nhost"), 5)
    writer.write(b"\r\n")

    rest = await asyncio.wait_for(reader.read(), 10)
    writer.close()

    assert rest == b""
