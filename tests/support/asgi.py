"""One HTTP exchange with an ASGI application, byte by byte, with a client that may leave."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class Exchange:
    """Runs the application as a task; the test reads its messages and may hang up."""

    def __init__(
        self,
        app: ASGIApp,
        path: str,
        body: object,
        headers: dict[str, str],
        method: str = "POST",
        *,
        whole: bool = True,
    ) -> None:
        """`whole`: False leaves the last byte of the body out."""
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        raw = json.dumps(body).encode()
        part = raw if whole else raw[:-1]
        self._inbox.put_nowait({"type": "http.request", "body": part, "more_body": not whole})
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("gateway", 80),
            "client": ("client", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(app(scope, self._inbox.get, self._outbox.put))  # type: ignore[arg-type]

    async def message(self) -> Message:
        return await asyncio.wait_for(self._outbox.get(), 5)

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    def drained(self) -> bool:
        """Everything that the application sent was read."""
        return self._outbox.empty()
