"""One line per request at its end, and an answer for what nobody else handled."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import InternalError
from gateway.middleware.request_id import request_id_of
from gateway.rest.problem import problem

log = logging.getLogger("gateway.access")
QUIET: Final = frozenset({"/healthz", "/readyz"})
CLIENT_GONE: Final = "client_gone"
"""How a request ended whose client left before its answer was complete."""
_encode = msgspec.json.Encoder().encode


def facts_of(scope: Scope) -> dict[str, Any]:
    """Fields of the request's line; handlers add theirs. Never text of a prompt or an answer, never a key."""
    facts: dict[str, Any] = scope["state"]["facts"]
    return facts


class AccessLog:
    def __init__(self, app: ASGIApp, now: Callable[[], float] = time.monotonic) -> None:
        self.app = app
        self._now = now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = self._now()
        facts: dict[str, Any] = {"request_id": request_id_of(scope), "method": scope["method"]}
        scope["state"]["facts"] = facts

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                facts["status"] = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            facts.setdefault("ended", CLIENT_GONE)  # Serve ends a request so when its client is gone
            raise
        except Exception:
            log.exception("request.crashed request_id=%s", facts["request_id"])
            facts["error"] = InternalError.code
            if "status" in facts:
                raise
            await problem(InternalError())(scope, receive, watched)
        finally:
            if scope["path"] not in QUIET:
                facts["ms"] = round((self._now() - started) * 1e3, 1)
                log.info("request.done %s", _encode(facts).decode())
