"""`GET models`: what the asking key may use."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.rest.access import tenant_of
from gateway.services import Services


async def models(request: Request) -> Response:
    services: Services = request.app.state.services
    tenant = tenant_of(request)
    listed = [
        {
            "id": served.facts.id,
            "object": "model",
            "created": served.facts.created,
            "owned_by": "phasegate",
            "max_model_len": served.facts.context_length,
        }
        for served in services.models
        if tenant.may_use(served.facts.id)
    ]
    return JSONResponse({"object": "list", "data": listed})
