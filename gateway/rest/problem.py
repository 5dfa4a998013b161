"""An error as an answer: one body that every client library can read."""

from typing import Any

from starlette.responses import JSONResponse, Response

from gateway.errors import ApiError


def body(error: ApiError) -> dict[str, Any]:
    """The native envelope and the OpenAI form at once."""
    return {
        "success": False,
        "errors": [{"code": error.number, "message": error.message}],
        "result": None,
        "messages": [],
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        },
    }


def problem(error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, error.retry_after_s))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body(error), error.status, headers)
