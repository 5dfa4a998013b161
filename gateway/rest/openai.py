"""`chat/completions`: the OpenAI dialect."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.dispatch.generation import Generation
from gateway.errors import ModelNotFound
from gateway.middleware.request_id import request_id_of
from gateway.prompt.schema import parse_chat
from gateway.rest import sse
from gateway.rest.access import model_for, tenant_of
from gateway.rest.body import read_object
from gateway.rest.completion import complete
from gateway.rest.usage import wording
from gateway.services import Services


async def chat_completions(request: Request) -> Response:
    services: Services = request.app.state.services
    tenant = tenant_of(request)
    ask = parse_chat(await read_object(request))
    names = (ask.model, request.query_params.get("model"))
    served = model_for(services, tenant, names, ModelNotFound)
    dialect = Chat(
        answer_id=f"chatcmpl-{request_id_of(request.scope)}",
        model=served.facts.id,
        system_fingerprint=served.system_fingerprint,
        created=int(services.wall_clock()),
        include_usage=ask.include_usage,
    )
    return await complete(
        request,
        services,
        tenant=tenant,
        served=served,
        ask=ask,
        dialect=dialect,
        default_max_tokens=None,
    )


class Chat:
    def __init__(
        self, *, answer_id: str, model: str, system_fingerprint: str, created: int, include_usage: bool
    ) -> None:
        self._answer_id = answer_id
        self._model = model
        self._fingerprint = system_fingerprint
        self._created = created
        self._include_usage = include_usage
        self._pieces = sse.TextFrames(lambda text: self._chunk_data({"content": text}, None))

    def opening(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> bytes:
        return self._pieces.frame(text)

    def closing(self, generation: Generation) -> bytes:
        finish = self._chunk({}, generation.finish_reason.value)
        if not self._include_usage:
            return finish
        return finish + sse.frame(
            self._head("chat.completion.chunk") | {"choices": [], "usage": wording(generation)}
        )

    def whole(self, text: str, generation: Generation) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "finish_reason": generation.finish_reason.value,
            "logprobs": None,
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": wording(generation)}

    def _chunk(self, delta: dict[str, str], finish_reason: str | None) -> bytes:
        return sse.frame(self._chunk_data(delta, finish_reason))

    def _chunk_data(self, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._answer_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
        }
