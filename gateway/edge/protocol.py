"""The HTTP server's side of one connection, with the deadlines and bounds that uvicorn lacks.

uvicorn waits for ever for the end of the headers, keeps headers of any size, waits for ever for a client that
does not read, and answers bytes that are no HTTP request in plain text.
"""

import asyncio
import logging
import secrets
import socket
from typing import Any, ClassVar, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.edge.limits import EdgeLimits
from gateway.errors import ApiError, HeadersTooLarge, InvalidRequest, RequestIncomplete
from gateway.rest import problem

log = logging.getLogger(__name__)
PER_HEADER: Final = 4
"""Bytes of a header line besides name and value."""

AFTERTHOUGHT_S: Final = 0.1
"""A loop that was held up runs its timers before it reads: what the client has sent in time must count."""


class Refused(Exception):
    """Ends the parsing of a request that is answered already."""


class GuardedProtocol(HttpToolsProtocol):
    """Subclass it to set `limits`: the server makes one for each connection, with arguments of its own."""

    limits: ClassVar[EdgeLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal: ApiError | None = None
        self._head_bytes: int | None = None
        """Received of headers that are not complete; None between them."""
        self._idle_bytes = 0
        """Received since headers or a body last went on: trailers, blank lines. Counted read by read."""
        self._deaf = False
        """What comes is no request, and the answers to those before it are under way."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None

    # The client's side of the connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        taken: socket.socket | None = transport.get_extra_info("socket")
        if taken is not None:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.limits.send_buffer_bytes)
        self._arm_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._reader_timer, self._rest_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        self._idle_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        elif self._head_timer is None and self._between_requests():
            self._arm_head()  # uvicorn takes anything for the next request, and waits for it without end
        if max(self._head_bytes or 0, self._idle_bytes) > self.limits.max_header_bytes:
            self._refuse(HeadersTooLarge())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    # What the parser finds.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._idle_bytes = 0
        if self._head_timer is None:
            self._arm_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_bytes is not None:  # a trailer comes too late to count: nobody may take it for a header
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._idle_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._idle_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        size = len(self.url) + sum(len(name) + len(value) + PER_HEADER for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = HeadersTooLarge()
            raise Refused
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._arm_reader()
        if self.cycle.response_complete and self.cycle.more_body and self._rest_timer is None:
            # The answer did not need the rest of the body. Who sends it soon may keep the connection.
            self._rest_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up."""
        self._refuse(self._refusal or InvalidRequest("The request is not valid HTTP."))

    def _between_requests(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and cycle.response_complete and not cycle.more_body

    # Deadlines.

    def _arm_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._head_due)

    def _head_due(self) -> None:
        self._head_timer = self.loop.call_later(AFTERTHOUGHT_S, self._head_late)

    def _head_late(self) -> None:
        if self._head_bytes is None:
            self.transport.close()  # connected, and said nothing
        else:
            self._refuse(RequestIncomplete())

    def _arm_reader(self) -> None:
        if self._reader_timer is None:
            self._reader_timer = self.loop.call_later(self.limits.client_timeout_s, self._reader_due)

    def _reader_due(self) -> None:
        self._reader_timer = self.loop.call_later(AFTERTHOUGHT_S, self._reader_late)

    def _reader_late(self) -> None:
        """The client took nothing, or less than what the buffer holds above its low-water mark."""
        self._reader_timer = None
        if self.transport.get_write_buffer_size():
            log.info("client.stalled unread_bytes=%d", self.transport.get_write_buffer_size())
            self.transport.abort()  # `close` would wait for the client to read

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close; behind a request, close when that is answered.

        Within the body of the request that is at work: whoever reads that is told that the client is gone.
        """
        if self.transport.is_closing():
            return
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            if self.pipeline or cycle.response_started or not cycle.more_body:
                self._deaf = True
                cycle.keep_alive = False
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = msgspec.json.encode(problem.body(error))
        name = secrets.token_hex(16)
        lines = (
            f"HTTP/1.1 {error.status} {error.code}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {name}",
            f"cf-ai-req-id: {name}",
            "connection: close",
        )
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        log.info("request.refused request_id=%s error=%s", name, error.code)
        self.transport.close()
        self._arm_reader()
