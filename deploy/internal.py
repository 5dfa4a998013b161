"""The second listener, for operators and their tools: metrics, requests and traces. Loopback only.

GET /metrics              every process of the system, in Prometheus' text form
GET /debug/requests/{id}  figures of one finished request
GET /debug/traces/{id}    the spans of one request
GET /healthz              this process answers; the only route without a token
"""

import asyncio
import hmac
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.config import INTERNAL_HOST
from deploy.metrics_page import ProcessPage, merge
from deploy.trace_view import find, to_json

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class InternalPortError(Exception):
    """The listener cannot be opened. The message names the key of the configuration."""


class Watched(Protocol):
    """The part of the fleet that is asked here."""

    async def metrics(self) -> list[ProcessPage]: ...

    async def request(self, request_id: str) -> dict[str, object] | None: ...


def listen(port: int) -> socket.socket:
    """Raises `InternalPortError` when the port cannot be had."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((INTERNAL_HOST, port))
        listener.listen()
    except OSError as bad:
        listener.close()
        raise InternalPortError(
            f"internal_port: {port} on {INTERNAL_HOST} cannot be used ({bad.strerror}): choose another "
            "one with --internal-port, or 0 for none"
        ) from None
    return listener


def internal_app(fleet: Callable[[], Watched], token: str, logs: Path) -> Starlette:
    """Called in the event loop in which the fleet is asked."""

    async def metrics(_: Request) -> Response:
        return Response(merge(await fleet().metrics()), media_type=METRICS_TYPE)

    async def request(request: Request) -> Response:
        summary = await fleet().request(request.path_params["name"])
        return JSONResponse(summary) if summary else _unknown("request")

    async def trace(request: Request) -> Response:
        found = await asyncio.to_thread(find, logs, request.path_params["name"])
        return JSONResponse(to_json(found)) if found else _unknown("trace")

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    return Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/debug/requests/{name:path}", request),
            Route("/debug/traces/{name:path}", trace),
            Route("/healthz", healthz),
        ],
        middleware=[Middleware(BearerOnly, token=token)],
    )


def _unknown(what: str) -> Response:
    return JSONResponse({"error": f"unknown {what}"}, 404)


class BearerOnly:
    """Everything but `/healthz` needs the token, also what does not exist."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/healthz" and not self._known(scope):
            refusal = PlainTextResponse(
                "the token in the state folder's internal-token is needed\n",
                401,
                {"www-authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            given.strip().encode("latin-1"), self._token
        )
