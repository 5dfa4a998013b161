"""T9: requests that are aborted wherever they happen to be leave every counter at zero."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from tests.support.asgi import Exchange
from tests.support.engine_pool import Script
from tests.support.gateways import AUTH, CHAT, RUN, TestGateway, running_gateway
from tests.support.renderer import tokens_of

REQUESTS = 200
AT_ONCE = 20
ANSWER = "All work and no play. " * 8


async def abort_somewhere(gateway: TestGateway, rng: random.Random) -> str:
    """One request and its end, in words."""
    stream, native = rng.random() < 0.5, rng.random() < 0.5
    prompt = {"prompt": "Hi there"} if native else {"messages": [{"role": "user", "content": "Hi"}]}
    body = prompt | {"stream": stream, "max_tokens": 150} | ({} if native else {"model": "small"})
    exchange = Exchange(gateway.app, RUN if native else CHAT, body, AUTH)
    for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89))):
        await asyncio.sleep(0)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 5)) if stream else 0):
        if not exchange.task.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(exchange.message(), 0.02)
    if exchange.task.done():
        return "answered"
    if rng.random() < 0.5:
        exchange.task.cancel()  # what Serve does when the client is gone
        await asyncio.wait([exchange.task])
        return "cancelled"
    exchange.hang_up()
    await exchange.task
    return "hung up"


@pytest.mark.parametrize("seed", [1])
async def test_two_hundred_aborts_at_random_moments_leave_every_counter_at_zero(seed: int) -> None:
    rng = random.Random(seed)
    script = Script(answer=ANSWER, chunk=1, hold_at=len(tokens_of(ANSWER)) // 2)
    ends: Counter[str] = Counter()

    # Leaving `running_gateway` asserts that no slot, place, subscription or call is left.
    async with running_gateway(script, max_in_flight=AT_ONCE) as gateway:
        for _ in range(REQUESTS // AT_ONCE):
            ends.update(await asyncio.gather(*(abort_somewhere(gateway, rng) for _ in range(AT_ONCE))))
            assert (gateway.capacity.in_flight, gateway.bus.subscribed, gateway.fleet.in_flight) == (0, 0, 0)

        started = len(gateway.pool.decodes)
        script.hold_at = None
        answer = await gateway.client.post(RUN, json={"prompt": "Hi", "max_tokens": 150}, headers=AUTH)

    assert ends.total() == REQUESTS
    assert ends["answered"] == 0
    assert min(ends["cancelled"], ends["hung up"]) > REQUESTS // 4
    assert REQUESTS // 10 < started < REQUESTS, "some before their calls, some after"
    assert answer.json()["result"]["response"] == ANSWER[:150]
