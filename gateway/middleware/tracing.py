"""One trace for each request, and its ids on every log line of it."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.middleware.access_log import QUIET, facts_of
from gateway.middleware.request_id import label_of, request_id_of
from gateway.telemetry import RequestTrace, Telemetry
from kv_transfer.api import request_fields


def trace_of(scope: Scope) -> RequestTrace:
    trace: RequestTrace = scope["state"]["trace"]
    return trace


class Trace:
    """Puts the trace at `scope["state"]["trace"]`. The one outside it has minted the request's id."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).getlist("traceparent")
        trace = self._telemetry.request(
            request_id_of(scope), label_of(scope), given[0] if len(given) == 1 else None
        )
        scope["state"]["trace"] = trace
        with request_fields(request_id_of(scope), trace.trace_id):
            try:
                await self.app(scope, receive, send)
            finally:
                trace.finish(facts_of(scope))
