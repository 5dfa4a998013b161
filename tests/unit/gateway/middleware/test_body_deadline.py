"""A body that drips ends in 408; the wait for a client that has sent everything has no deadline."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import RequestIncomplete
from gateway.middleware.body_deadline import BodyDeadline

MORE: Message = {"type": "http.request", "body": b"x", "more_body": True}
LAST: Message = {"type": "http.request", "body": b"x", "more_body": False}
LEFT: Message = {"type": "http.disconnect"}


async def heard(messages: list[tuple[float, Message]], timeout_s: float, asked: int) -> list[str]:
    """Types of the messages that an application which asks so often hears. Each comes after a pause."""
    source: Iterator[tuple[float, Message]] = iter(messages)
    got = []

    async def receive() -> Message:
        pause, message = next(source)
        await asyncio.sleep(pause)
        return message

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(asked):
            got.append((await receive())["type"])

    async def send(_: Message) -> None:
        raise AssertionError("nothing is sent")

    await BodyDeadline(app, timeout_s)({"type": "http"}, receive, send)
    return got


async def test_a_body_that_drips_steadily_is_refused_at_the_deadline() -> None:
    with pytest.raises(RequestIncomplete):
        await heard([(0.02, MORE)] * 100, timeout_s=0.1, asked=100)


async def test_a_body_in_time_is_read_and_its_client_may_stay_as_long_as_it_likes() -> None:
    assert await heard([(0, MORE), (0, LAST), (0.2, LEFT)], timeout_s=0.1, asked=3) == [
        "http.request",
        "http.request",
        "http.disconnect",
    ]


async def test_a_client_that_leaves_in_the_middle_is_told_as_such() -> None:
    assert await heard([(0, MORE), (0, LEFT)], timeout_s=1, asked=2) == ["http.request", "http.disconnect"]
