"""An error as an answer: one body that every client library can read."""

from typing import Any, Final

from starlette.responses import JSONResponse, Response

from gateway.errors import ApiError, BodyTooLarge, RequestIncomplete

CUT_SHORT: Final = (BodyTooLarge, RequestIncomplete)


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
    if isinstance(error, CUT_SHORT):
        headers["connection"] = "close"  # what is left of the body is not waited for
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body(error), error.status, headers)
