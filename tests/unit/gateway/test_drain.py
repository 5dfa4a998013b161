"""A gateway on its way out: nothing new, time for what is in flight, a word to whoever is left."""

import asyncio
import json

import pytest

from gateway.drain import Drain, take_leave
from gateway.errors import ShuttingDown
from tests.support.asgi import Exchange
from tests.support.engine_pool import Script
from tests.support.gateways import AUTH, RUN, TestGateway, running_gateway
from workers.api import FaultKind

ASK = {"prompt": "Hi", "max_tokens": 60}


async def held_stream(gateway: TestGateway) -> Exchange:
    """A stream after its first text, whose engine makes nothing more."""
    exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
    assert (await exchange.message())["status"] == 200
    await exchange.message()
    return exchange


async def rest_of(exchange: Exchange) -> bytes:
    await asyncio.wait_for(exchange.task, 5)
    parts = b""
    while not exchange.drained():
        parts += (await exchange.message()).get("body", b"")
    return parts


async def test_new_requests_are_refused_with_a_time_and_those_in_flight_finish() -> None:
    script = Script(hold_at=2)
    async with running_gateway(script) as gateway:
        exchange = await held_stream(gateway)
        gateway.drain.refuse()

        refused = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        ready = await gateway.client.get("/readyz")
        script.release.set()
        rest = await rest_of(exchange)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert ready.status_code == 503
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_stream_that_cannot_finish_ends_in_an_event_that_says_so() -> None:
    async with running_gateway(Script(hold_at=2)) as gateway:
        exchange = await held_stream(gateway)

        assert gateway.drain.cut() == 1
        rest = await rest_of(exchange)

    assert b"[DONE]" not in rest
    last = json.loads(rest.removesuffix(b"\n\n").split(b"data: ")[-1])
    assert (last["error"]["code"], last["errors"][0]["code"]) == ("shutting_down", 7013)
    assert gateway.pool.cancelled["decode"] == 1


async def test_an_answer_that_cannot_finish_is_a_status() -> None:
    async with running_gateway(Script(hold_at=0)) as gateway:
        asked = asyncio.create_task(gateway.client.post(RUN, json=ASK, headers=AUTH))
        await gateway.pool.decoding.wait()

        gateway.drain.cut()
        answer = await asked

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) >= 1


async def test_an_engine_on_its_way_out_is_named_as_such_and_worth_a_retry() -> None:
    async with running_gateway(Script(fault=FaultKind.DRAINING)) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
    assert int(answer.headers["retry-after"]) >= 1


def test_whoever_comes_after_the_cut_is_told_at_once_and_who_has_left_is_not() -> None:
    drain = Drain()
    told: list[str] = []
    with drain.inside(lambda: told.append("left")):
        pass
    with drain.inside(lambda: told.append("inside")):
        assert drain.cut() == 1
    with drain.inside(lambda: told.append("late")):
        assert told == ["inside", "late"]
    with pytest.raises(ShuttingDown):
        drain.check()


async def test_whoever_waits_for_the_leave_hears_when_the_last_has_finished() -> None:
    script = Script(hold_at=2)
    async with running_gateway(script) as gateway:
        exchange = await held_stream(gateway)
        leaving = asyncio.create_task(take_leave(gateway.drain, gateway.capacity, 60, refuse_new=True))
        await asyncio.sleep(0)
        refused = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        assert not leaving.done()
        script.release.set()

        assert await asyncio.wait_for(leaving, 5) == {"found": 1, "cut": 0}
        assert (await rest_of(exchange)).endswith(b"data: [DONE]\n\n")
    assert refused.status_code == 503


async def test_after_the_grace_what_is_left_is_told_and_what_was_on_its_way_was_answered() -> None:
    async with running_gateway(Script(hold_at=2)) as gateway:
        exchange = await held_stream(gateway)
        leaving = asyncio.create_task(take_leave(gateway.drain, gateway.capacity, 0.5, refuse_new=False))
        await asyncio.sleep(0)
        on_its_way = await gateway.client.get("/readyz")

        assert await leaving == {"found": 1, "cut": 1}
        assert b"shutting_down" in await rest_of(exchange)
        assert (await gateway.client.post(RUN, json=ASK, headers=AUTH)).status_code == 503
    assert on_its_way.status_code == 200
