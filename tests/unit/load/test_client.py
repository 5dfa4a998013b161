import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from load.client import TIMEOUT, Target, ask, objections, session, understood
from load.record import Record

SILENT = 299
"""A status with which the server never answers."""

TARGET = Target("it", "http://it", "model", "the key")
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
END = {"choices": [{"delta": {}, "finish_reason": "length"}]}


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": None}]}


def stream(events: Iterable[dict[str, Any]], *, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


async def answered(content: bytes, status: int = 200, **options: Any) -> tuple[Record, dict[str, Any]]:
    """A record, and what the server was sent."""
    seen: dict[str, Any] = {}

    async def serve(request: web.Request) -> web.Response:
        seen.update(body=await request.json(), headers=request.headers)
        if status == SILENT:
            await asyncio.Event().wait()
        return web.Response(status=status, body=content, headers={"x-request-id": "r1"})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", serve)
    async with TestServer(app) as server, session() as http:
        target = replace(TARGET, base_url=str(server.make_url("")).rstrip("/"))
        return await ask(http, target, [], 3, 0.0, **options), seen


def test_only_chunks_with_text_are_timed() -> None:
    whole = stream([text(""), text("a"), text("b"), END, USAGE])
    cuts = [0, whole.index(b'"a"'), whole.index(b'"b"'), whole.index(b"DONE") + 1, len(whole)]
    pieces = [(float(n), whole[a:b]) for n, (a, b) in enumerate(pairwise(cuts), start=1)]

    record = understood(pieces, 0.0, 0.5, "r1")

    assert record.error is None
    assert record.chunk_s == (2.0, 3.0)  # when the piece came that has the end of the event's line
    assert (record.end_s, record.sent_s) == (4.0, 0.5)
    assert (record.text, record.prompt_tokens, record.output_tokens) == ("ab", 7, 3)
    assert (record.finish_reason, record.request_id) == ("length", "r1")


async def test_both_servers_are_asked_for_greedy_tokens_and_their_own_counts() -> None:
    record, seen = await answered(stream([text("a"), END, USAGE]))
    sent = seen["body"]

    assert (record.error, record.request_id) == (None, "r1")
    assert seen["headers"]["authorization"] == "Bearer the key"
    assert (sent["temperature"], sent["max_tokens"], sent["stream"]) == (0, 3, True)
    assert sent["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "content",
    [
        stream([text("a"), END, USAGE], done=False),
        stream([END, USAGE]),
        stream([text("a"), END]),
        stream([text("a"), USAGE]),
        stream([text("a"), {"error": {"message": "lost"}}]),
        b"data: {broken\n\n",
    ],
    ids=["no end", "no text", "no usage", "no finish reason", "an error inside", "no JSON"],
)
async def test_a_stream_that_is_not_whole_is_a_failure(content: bytes) -> None:
    record, _ = await answered(content)

    assert record.failed


async def test_a_refusal_is_a_failure_with_the_servers_words() -> None:
    record, _ = await answered(b"too busy", status=503)

    assert record.error == "503: too busy"


async def test_an_answer_that_does_not_come_is_a_timeout() -> None:
    record, _ = await answered(b"", status=SILENT, timeout_s=0.05)

    assert record.error == TIMEOUT


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    async with session() as http:
        record = await ask(http, replace(TARGET, base_url="http://127.0.0.1:1"), [], 3, 0.0)

    assert record.failed


def test_a_client_that_keeps_up_may_report() -> None:
    assert objections([0.001] * 100, [0.0] * 10, shortest_ttft_s=0.2) == []


def test_a_client_whose_loop_or_sending_is_late_may_not() -> None:
    slow = [0.001] * 90 + [0.02] * 10

    assert len(objections(slow, [0.0] * 10, shortest_ttft_s=0.2)) == 1
    assert len(objections([0.001] * 100, [0.02] * 10, shortest_ttft_s=0.2)) == 1


def test_a_client_that_did_not_watch_itself_may_not() -> None:
    assert len(objections([], [], shortest_ttft_s=0.2)) == 2


def test_the_key_is_in_no_representation() -> None:
    assert "the key" not in repr(TARGET)
