"""What Serve says itself is said in our words, with our ids."""

from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gateway.edge.answers import EdgeAnswers


async def ask(
    answer: Response, *, path: str = "/x", hide_routes: bool = False, **options: Any
) -> httpx.Response:
    """What a client gets when this is what the server behind the edge answers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"seen": list(scope["headers"])}
        if options.get("echo"):
            names = [name.decode() for name, _ in scope["headers"]]
            await JSONResponse({"headers": names})(scope, receive, send)
            return
        await answer(scope, receive, send)

    transport = httpx.ASGITransport(EdgeAnswers(app, hide_routes=hide_routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        return await client.get(path, headers=options.get("headers"))


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (404, 404, "not_found"),
        (408, 408, "timeout"),
        (429, 429, "capacity_exceeded"),
        (500, 502, "gateway_lost"),
        (503, 503, "gateway_unavailable"),
    ],
)
async def test_an_error_that_serve_words_has_our_body(said: int, status: int, code: str) -> None:
    answer = await ask(PlainTextResponse("Internal detail with an address", said))

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "detail" not in answer.text
    assert ("retry-after" in answer.headers) == (status in (429, 503))
    assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"]


@pytest.mark.parametrize("answer", [JSONResponse({"a": 1}, 500), PlainTextResponse("text", 200)])
async def test_what_the_gateway_words_passes_as_it_is(answer: Response) -> None:
    got = await ask(answer)

    assert (got.status_code, got.content) == (answer.status_code, answer.body)


async def test_a_stream_passes_piece_by_piece() -> None:
    async def pieces() -> Any:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    got = await ask(StreamingResponse(pieces(), media_type="text/event-stream"))

    assert got.text == "data: 1\n\ndata: 2\n\n"


async def test_serves_label_is_not_a_second_header() -> None:
    labelled = JSONResponse({}, headers={"x-request-id": "serve", "cf-ai-req-id": "gateway"})
    got = await ask(labelled, headers={"x-request-id": "mine"})

    assert got.headers.get_list("x-request-id") == got.headers.get_list("cf-ai-req-id") == ["mine"]


async def test_serves_switches_do_not_get_in() -> None:
    switches = {"x-request-disconnect-disabled": "?1", "X-Request-Timeout-Seconds": "1", "x-other": "kept"}
    got = await ask(Response(), headers=switches, echo=True)

    names = got.json()["headers"]
    assert "x-other" in names
    assert not ({name.lower() for name in switches} - {"x-other"}) & set(names)


@pytest.mark.parametrize(("hidden", "status"), [(True, 404), (False, 200)])
async def test_serves_routes_are_hidden_where_no_balancer_needs_them(hidden: bool, status: int) -> None:
    got = await ask(PlainTextResponse("success"), path="/-/healthz", hide_routes=hidden)

    assert got.status_code == status
