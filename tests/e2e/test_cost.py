"""The two arms of `python -m load gateway-cost` in one running system: the same answers on both ways."""

import asyncio
from collections.abc import Iterator
from random import Random

import pytest

from load.client import Target, ask_all, session
from load.prompts import messages
from load.record import Record
from tests.support.stack import START_TIMEOUT_S, Stack, eventually, running_stack

pytestmark = [pytest.mark.long, pytest.mark.timeout(START_TIMEOUT_S + 120)]
SUFFIX = "-through-handle"
STREAMS, CLIENTS = 48, 8


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, model_dir: object) -> Iterator[Stack]:
    config = {"testing": {"handle_arm": True}}
    with running_stack(tmp_path_factory.mktemp("cost"), profile="scripted", config=config) as stack:
        yield stack


def answers(stack: Stack, model: str, max_tokens: int) -> tuple[Record, ...]:
    rng = Random(7)  # the same prompts for every model
    prompts = [messages(rng, 40 + 3 * place) for place in range(STREAMS)]
    target = Target("it", stack.base_url, model, stack.api_key)

    async def all_at_once() -> tuple[Record, ...]:
        async with session() as http:
            return await ask_all(http, target, prompts, max_tokens)

    return asyncio.run(all_at_once())


def test_many_streams_at_once_are_whole_and_the_same_on_both_ways(scripted: Stack) -> None:
    bus = answers(scripted, scripted.model, 64)
    handle = answers(scripted, scripted.model + SUFFIX, 64)

    assert [record.error for record in (*bus, *handle)] == [None] * 2 * STREAMS
    assert [record.text for record in bus] == [record.text for record in handle]
    assert {record.output_tokens for record in (*bus, *handle)} == {64}
    assert len({record.text for record in bus}) == STREAMS


@pytest.mark.parametrize("suffix", ["", SUFFIX], ids=["bus", "handle"])
def test_clients_that_leave_free_the_engines_on_both_ways(scripted: Stack, suffix: str) -> None:
    target = Target("it", scripted.base_url, scripted.model + suffix, scripted.api_key)

    async def leave() -> None:
        async with session() as http:
            asking = asyncio.create_task(ask_all(http, target, [messages(Random(3), 50)] * CLIENTS, 4000))
            await asyncio.to_thread(eventually, inside, lambda count: count == CLIENTS, what="full engine")
            asking.cancel()
            await asyncio.wait({asking})

    def inside() -> int:
        return sum(r["running"] for r in scripted.control("/status").json()["replicas"])

    asyncio.run(leave())

    eventually(scripted.idle, bool, what="idle system")
