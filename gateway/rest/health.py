"""Liveness and readiness. No key is needed; nothing is told but yes or no."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.services import Services


async def healthz(_: Request) -> Response:
    """This process answers."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """Every model has at least one prefill and one decode replica attached, and new requests are taken."""
    services: Services = request.app.state.services
    if services.drain.refusing:
        return JSONResponse({"status": "shutting down"}, 503)
    ready = all(served.engines.fleet.ready() for served in services.models)
    return JSONResponse({"status": "ready" if ready else "waiting for engines"}, 200 if ready else 503)
