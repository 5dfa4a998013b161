import json
from collections.abc import Iterable
from itertools import count
from typing import Any

import httpx
import pytest

from load.client import Target, ask, objections
from load.record import Record

TARGET = Target("it", "http://it", "model", "the key")
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
END = {"choices": [{"delta": {}, "finish_reason": "length"}]}


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": None}]}


def stream(events: Iterable[dict[str, Any]], *, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


async def answered(content: bytes, status: int = 200) -> tuple[Record, httpx.Request]:
    """A record whose clock ticks once a reading, and the request that was sent."""
    seen: list[httpx.Request] = []

    def server(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(status, content=content, headers={"x-request-id": "r1"})

    ticks = count(1)
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        record = await ask(http, TARGET, [], 3, 0.0, clock=lambda: float(next(ticks)))
    return record, seen[0]


async def test_only_chunks_with_text_are_timed() -> None:
    record, _ = await answered(stream([text(""), text("a"), text("b"), END, USAGE]))

    assert record.error is None
    assert record.chunk_s == (3.0, 4.0)
    assert (record.text, record.prompt_tokens, record.output_tokens) == ("ab", 7, 3)
    assert (record.finish_reason, record.request_id) == ("length", "r1")


async def test_both_servers_are_asked_for_greedy_tokens_and_their_own_counts() -> None:
    _, request = await answered(stream([text("a"), END, USAGE]))
    sent = json.loads(request.content)

    assert request.headers["authorization"] == "Bearer the key"
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
