"""Outermost in the HTTP server: Serve's own words reach no client, and its switches come from none."""

import secrets
from collections.abc import Mapping
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import (
    RETRY_AFTER_S,
    ApiError,
    DeadlineExceeded,
    GatewayLost,
    GatewayUnavailable,
    NoRoute,
    OutOfCapacity,
)
from gateway.middleware.request_id import LABEL
from gateway.rest.problem import problem

SERVES_SWITCHES: Final = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
    }
)
"""With these headers a client could stop Serve from noticing that it left."""
SERVES_ROUTES: Final = "/-/"
BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    404: NoRoute,
    408: DeadlineExceeded,
    429: OutOfCapacity,
    500: GatewayLost,  # the gateway's own faults have a body: this one could not answer any more
    503: GatewayUnavailable,
}


class EdgeAnswers:
    """One label per request, and our error body for every error that Serve words itself."""

    def __init__(self, app: ASGIApp, *, hide_routes: bool) -> None:
        """`hide_routes`: answer 404 on Serve's own routes. Behind HAProxy they are its health checks."""
        self.app = app
        self._hide_routes = hide_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("x-request-id")
        label = given[0] if len(given) == 1 and LABEL.fullmatch(given[0]) else secrets.token_hex(16)
        kept = [
            (name, value)
            for name, value in scope["headers"]
            if name not in SERVES_SWITCHES and name != b"x-request-id"
        ]
        # In place: the server's own view of the request must not differ from the gateway's.
        scope["headers"][:] = [*kept, (b"x-request-id", label.encode())]
        replaced = False

        async def worded(message: Message) -> None:
            nonlocal replaced
            if message["type"] == "http.response.start":
                error = _error_for(message["status"], MutableHeaders(scope=message))
                if error is None:
                    await named(message)
                    return
                replaced = True
                await problem(error)(scope, receive, named)
            elif not replaced:
                await send(message)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = label
                headers["cf-ai-req-id"] = label
            await send(message)

        if self._hide_routes and scope["path"].startswith(SERVES_ROUTES):
            await problem(NoRoute())(scope, receive, named)
            return
        await self.app(scope, receive, worded)


def _error_for(status: int, headers: Headers) -> ApiError | None:
    """Our error in place of Serve's; None when the answer has a body of ours."""
    if status < 400 or headers.get("content-type", "").startswith("application/json"):
        return None
    kind = BY_STATUS.get(status)
    if kind is None:
        return None
    return kind(retry_after_s=RETRY_AFTER_S if kind.status in (429, 503) else None)
