"""`ai/run`: the native dialect. Answers in the envelope, streams bare events."""

import secrets
import string
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.dispatch.generation import Generation
from gateway.errors import NoSuchModel
from gateway.prompt.schema import parse_run
from gateway.rest import sse
from gateway.rest.access import model_for, tenant_of
from gateway.rest.body import read_object
from gateway.rest.completion import complete
from gateway.rest.usage import wording
from gateway.services import Services

DEFAULT_MAX_TOKENS = 256
_PAD = string.ascii_letters + string.digits


async def run(request: Request) -> Response:
    services: Services = request.app.state.services
    tenant = tenant_of(request)
    path_model = request.path_params["model"]
    ask = parse_run(await read_object(request))
    names = (path_model, request.query_params.get("model"), ask.model)
    served = model_for(services, tenant, names, NoSuchModel)
    return await complete(
        request,
        services,
        tenant=tenant,
        served=served,
        ask=ask,
        dialect=Native(),
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )


class Native:
    def opening(self) -> bytes:
        return b""

    def piece(self, text: str) -> bytes:
        # `p` hides the length of the text from who sees only the size of encrypted packets.
        padding = "".join(secrets.choice(_PAD) for _ in range(secrets.randbelow(32)))
        return sse.frame({"response": text, "p": padding})

    def closing(self, generation: Generation) -> bytes:
        return sse.frame({"response": "", "usage": wording(generation)})

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        result = {"response": text, "usage": wording(generation)}
        return {"result": result, "success": True, "errors": [], "messages": []}
