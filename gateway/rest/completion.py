"""From a validated request to an answer, streamed or not, in either dialect."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from gateway.dispatch.driver import Call, Job
from gateway.dispatch.generation import Generation
from gateway.errors import ApiError, ContextOverflow, InternalError
from gateway.metrics import Stage
from gateway.middleware.access_log import CLIENT_GONE, facts_of
from gateway.middleware.request_id import body_send_of, label_of, request_id_of
from gateway.middleware.tracing import trace_of
from gateway.prompt.render import Renderer
from gateway.prompt.schema import Ask, bad_input
from gateway.rest import problem, sse
from gateway.services import ServedModel, Services
from gateway.tenants.model import Tenant, combined_salt

log = logging.getLogger(__name__)
T = TypeVar("T")


class Dialect(Protocol):
    """How one API words an answer."""

    def opening(self) -> bytes:
        """What precedes the first text of a stream; may be empty."""

    def piece(self, text: str) -> bytes: ...

    def closing(self, generation: Generation) -> bytes:
        """What follows the last text, up to and without `[DONE]`."""

    def whole(self, text: str, generation: Generation) -> dict[str, Any]: ...


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


async def complete(
    request: Request,
    services: Services,
    *,
    tenant: Tenant,
    served: ServedModel,
    ask: Ask,
    dialect: Dialect,
    default_max_tokens: int | None,
) -> Response:
    """The answer. Every error that can be known before the first token is raised, also when streaming."""
    request_id, receive = request_id_of(request.scope), remembering(request.receive)
    async with AsyncExitStack() as stack:
        await services.holds.at("before_admission", request_id)
        services.drain.check()
        stack.enter_context(services.capacity.slot())
        trace = trace_of(request.scope)
        trace.enter(Stage.RENDER)
        await services.holds.at("rendering", request_id)
        token_ids = await _render(served.renderer, ask)
        limit = _output_limit(len(token_ids), ask, served.renderer, default_max_tokens)
        if ask.sampling.top_k > served.renderer.vocabulary_size:
            raise bad_input(f"'/top_k' must be <= {served.renderer.vocabulary_size}", "top_k")
        job = Job(
            request_id=request_id,
            label=label_of(request.scope),
            token_ids=token_ids,
            cache_salt=combined_salt(tenant.account.cache_salt, ask.cache_salt),
            sampling=replace(ask.sampling, max_tokens=limit),
            stop_token_ids=served.renderer.stop_token_ids,
            trace=trace,
        )
        facts = facts_of(request.scope)
        facts.update(model=served.facts.id, prompt_tokens=len(token_ids), stream=ask.stream)
        call = await stack.enter_async_context(Call(served.engines, job))
        generation = Generation(call, served.renderer.texts(), ask.stops, len(token_ids))
        # A stream's resources outlive this function: the response closes them.
        pieces = await stack.enter_async_context(aclosing(generation.pieces()))
        try:
            if ask.stream:
                first = await until_disconnect(receive, _first(pieces))
                return TokenStream(
                    stack=stack.pop_all(),
                    pieces=pieces,
                    first=first,
                    generation=generation,
                    dialect=dialect,
                    facts=facts,
                    receive=receive,
                )
            text = await until_disconnect(receive, _joined(pieces))
        except ClientLeft:
            facts.update(ended=CLIENT_GONE)
            return Response(status_code=499)
        _note(facts, generation, call)
        return JSONResponse(dialect.whole(text, generation))


async def _first(pieces: AsyncGenerator[str]) -> str | None:
    """None: the answer has no text."""
    return await anext(pieces, None)


async def _joined(pieces: AsyncGenerator[str]) -> str:
    return "".join([piece async for piece in pieces])


def _note(facts: dict[str, Any], generation: Generation, call: Call | None = None) -> None:
    usage = generation.usage
    facts.update(output_tokens=usage.completion_tokens, cached_tokens=usage.cached_tokens)
    if call is not None and call.ttft_s is not None:
        facts.update(ttft_ms=round(call.ttft_s * 1e3, 1))


async def _render(renderer: Renderer, ask: Ask) -> tuple[int, ...]:
    try:
        if ask.raw_prompt is not None:
            return await renderer.render_text(ask.raw_prompt)
        return await renderer.render_chat(ask.messages)
    except ContextOverflow as overflow:
        raise ContextOverflow(overflow.message, ask.prompt_field) from None


def _output_limit(prompt_tokens: int, ask: Ask, renderer: Renderer, default: int | None) -> int:
    """Tokens the answer may have: as asked if that fits, else the default cut to what remains.

    Raises:
        ContextOverflow: what the client named, or a single token, does not fit.
    """
    remaining = renderer.context_length - prompt_tokens
    wanted = ask.max_tokens if ask.max_tokens is not None else 1
    if wanted > remaining:
        param = "max_tokens" if ask.max_tokens is not None and remaining > 0 else ask.prompt_field
        raise ContextOverflow.of(prompt_tokens, wanted, renderer.context_length, param=param)
    if ask.max_tokens is not None:
        return ask.max_tokens
    return remaining if default is None else min(default, remaining)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result.

    Raises:
        ClientLeft: the client went first; the work was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def remembering(receive: Receive) -> Receive:
    """The same, but it tells for ever that the client is gone: who heard it first may have been busy."""
    gone: list[Message] = []

    async def receive_again() -> Message:
        if gone:
            return gone[0]
        message = await receive()
        if message["type"] == "http.disconnect":
            gone.append(message)
        return message

    return receive_again


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class TokenStream(Response):
    """The stream of one answer. Owns the request's resources until its last byte."""

    def __init__(
        self,
        *,
        stack: AsyncExitStack,
        pieces: AsyncGenerator[str],
        first: str | None,
        generation: Generation,
        dialect: Dialect,
        facts: dict[str, Any],
        receive: Receive,
    ) -> None:
        super().__init__()
        self._stack = stack
        self._pieces = pieces
        self._first = first
        self._generation = generation
        self._dialect = dialect
        self._facts = facts
        self._receive = receive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            try:
                await until_disconnect(self._receive, self._stream(send, body_send_of(scope)))
            except ClientLeft:
                self._facts.update(ended=CLIENT_GONE)
            finally:
                _note(self._facts, self._generation)

    async def _stream(self, start: Send, send: Send) -> None:
        await _send(start, {"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        try:
            await _write(send, self._dialect.opening())
            if self._first is not None:
                await _write(send, self._dialect.piece(self._first))
                async for text in self._pieces:
                    await _write(send, self._dialect.piece(text))
            await _write(send, self._dialect.closing(self._generation) + sse.DONE)
        except ApiError as error:
            # The status is sent: the stream says what happened and ends without [DONE].
            self._facts.update(ended=error.code)
            await _write(send, sse.frame(problem.body(error)))
        except ClientLeft:
            raise
        except Exception:
            log.exception("stream.failed")
            self._facts.update(ended=InternalError.code)
            await _write(send, sse.frame(problem.body(InternalError())))
        await _send(send, {"type": "http.response.body", "body": b"", "more_body": False})


async def _write(send: Send, data: bytes) -> None:
    if data:
        await _send(send, {"type": "http.response.body", "body": data, "more_body": True})


async def _send(send: Send, message: Message) -> None:
    """Only here an `OSError`, and a time-out is one, says that the client is gone."""
    try:
        await send(message)
    except OSError:
        raise ClientLeft from None
