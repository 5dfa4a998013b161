"""The HTTP surface: routes, and the order in which a request passes the middleware."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.errors import ApiError, InvalidRequest, MethodNotAllowed, NoRoute
from gateway.middleware.access_log import CLIENT_GONE, AccessLog
from gateway.middleware.auth import Auth
from gateway.middleware.body_deadline import BodyDeadline
from gateway.middleware.body_limit import BodyLimit
from gateway.middleware.request_id import RequestId
from gateway.middleware.tracing import Trace
from gateway.rest import catalogue, health, integrity, openai, workers_ai
from gateway.rest.problem import problem
from gateway.services import Services

ACCOUNT = "/client/v4/accounts/{account}/ai"


def create_app(services: Services) -> Starlette:
    app = Starlette(
        routes=[
            Route(f"{ACCOUNT}/run/{{model:path}}", workers_ai.run, methods=["POST"]),
            Route(f"{ACCOUNT}/integrity", integrity.coverage, methods=["GET"]),
            *(
                route
                for prefix in (f"{ACCOUNT}/v1", "/v1")
                for route in (
                    Route(f"{prefix}/chat/completions", openai.chat_completions, methods=["POST"]),
                    Route(f"{prefix}/models", catalogue.models, methods=["GET"]),
                )
            ),
            Route("/healthz", health.healthz, methods=["GET"]),
            Route("/readyz", health.readyz, methods=["GET"]),
        ],
        middleware=[
            Middleware(RequestId, proxy_labels=services.config.proxy_labels),
            Middleware(Trace, telemetry=services.telemetry),
            Middleware(AccessLog),
            Middleware(Auth, resolve=services.keys.resolve),
            Middleware(BodyLimit, max_bytes=services.config.max_body_bytes),
            Middleware(BodyDeadline, timeout_s=services.config.body_timeout_s),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_exception,
            ClientDisconnect: _client_left,
        },
    )
    app.router.redirect_slashes = False  # a redirect would make clients repeat their body, or drop it
    app.state.services = services
    return app


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["state"]["facts"].update(error=error.code)
    return problem(error)


def _client_left(request: Request, _: Exception) -> Response:
    """In the middle of its body: nobody reads an answer, and nothing is wrong here."""
    request.scope["state"]["facts"].update(ended=CLIENT_GONE)
    return Response(status_code=499)


def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    by_status: dict[int, type[ApiError]] = {404: NoRoute, 405: MethodNotAllowed}
    response = _api_error(request, by_status.get(error.status_code, InvalidRequest)())
    if error.headers is not None and "Allow" in error.headers:
        response.headers["allow"] = error.headers["Allow"]
    return response
