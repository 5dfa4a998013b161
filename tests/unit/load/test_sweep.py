"""The sweep against a small server of the test's own."""

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from load.__main__ import parser
from load.capacity import HEADLINES
from load.client import Target
from load.sweep import Loop, _measure, verdict

EVENTS = (
    {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "b"}, "finish_reason": "length"}]},
    {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 2}},
)


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    """Takes 20 ms for an answer, and refuses when it is told so."""

    async def serve(request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] == "broken":
            return web.Response(status=503, text="no")
        await asyncio.sleep(0.02)
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS)
        return web.Response(text=lines + "data: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", serve)
    async with TestServer(app) as running:
        yield running


def options(server: TestServer, *more: str) -> Namespace:
    url = str(server.make_url("")).rstrip("/")
    usual = ("--concurrency", "1", "3", "--per-client", "2", "--repeats", "2", "--lengths", "30")
    return parser().parse_args(["sweep", "--url", url, "--model", "m", *usual, *more])


async def measured(server: TestServer, *more: str, model: str = "m") -> dict[str, Any]:
    found = options(server, *more)
    result, valid = await _measure(found, {}, Target("server", found.url, model))
    assert result["summary"]["valid"] is valid
    return result


async def test_every_loop_has_a_row_and_the_open_ones_follow_from_the_closed_ones(server: TestServer) -> None:
    result = await measured(server)

    assert {row["concurrency"] for row in result["rows"] if row["loop"] == "closed"} == {1, 3}
    best = max(row["requests_per_s"] for row in result["rows"] if row["loop"] == "closed")
    rates = sorted(row["rate_rps"] for row in result["rows"] if row["loop"] == "open")
    assert rates == pytest.approx([0.5 * best, 0.8 * best], rel=0.01)
    # Two rounds of two requests for each client, four at least.
    requests = {row["concurrency"]: row["requests"] for row in result["rows"] if row["loop"] == "closed"}
    assert requests == {1: 8, 3: 12}
    assert set(HEADLINES) < set(result["summary"])


async def test_given_rates_and_one_kind_of_loop_are_all_that_is_run(server: TestServer) -> None:
    result = await measured(server, "--loop", "open", "--rates", "50")

    assert [(row["loop"], row["rate_rps"]) for row in result["rows"]] == [("open", 50.0)]


async def test_a_server_that_answers_nothing_makes_the_run_invalid_and_has_no_figures(
    server: TestServer,
) -> None:
    result = await measured(server, "--loop", "closed", model="broken")

    assert result["summary"]["valid"] is False
    assert result["summary"]["throughput_tok_s"] is None
    assert result["summary"]["failed"] == 20
    assert any("no request was answered" in line for line in result["summary"]["invalid"])


async def test_a_client_that_falls_behind_withholds_its_figures(server: TestServer) -> None:
    async def hog() -> None:
        while True:
            _ = sum(range(2_000_000))  # tens of milliseconds in which the event loop stands still
            await asyncio.sleep(0.01)

    hogging = asyncio.create_task(hog())
    try:
        result = await measured(server, "--loop", "closed", "--concurrency", "1")
    finally:
        hogging.cancel()

    assert result["summary"]["valid"] is False
    assert result["summary"]["throughput_tok_s"] is None
    assert any("late at the 99th percentile" in line for line in result["summary"]["invalid"])
    assert result["rows"][0]["requests"] == 8


def test_a_row_with_one_answer_is_no_reason_to_refuse() -> None:
    names = Loop(128, clients=4).names

    assert verdict([names | {"failed": 3, "requests": 4}]) == []
    assert len(verdict([names | {"failed": 4, "requests": 4}])) == 1


@pytest.mark.parametrize("arguments", [[], ["--url", "http://x", "--compare", "exact"]])
def test_either_a_server_or_a_profile_is_named(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["sweep", *arguments])


def test_a_result_of_the_command_line_tool_is_written_and_the_key_is_not(tmp_path: Path) -> None:
    from load.manifest import without_key

    assert without_key(["sweep", "--key", "pg-1", "--model", "m"]) == [
        *("sweep", "--key", "(hidden)", "--model", "m")
    ]
    assert without_key(["plan", "--json", "/some/plan.json"]) == ["plan", "--json", "plan.json"]
    assert without_key(["sweep", "--key=pg-1"]) == ["sweep", "--key=(hidden)"]
