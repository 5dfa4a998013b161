"""Two ways to put load on a server. Closed: so many clients, each with one request at a time. Open: requests
come when they come, however slow the server is.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import aiohttp

from load.client import Clock, Target, ask
from load.record import Record

Prompt = list[dict[str, str]]
Send = Callable[[Prompt, float], Awaitable[Record]]
"""A prompt, and when it was due."""


def sender(http: aiohttp.ClientSession, target: Target, output_tokens: int, timeout_s: float) -> Send:
    def send(prompt: Prompt, due_s: float) -> Awaitable[Record]:
        return ask(http, target, prompt, output_tokens, due_s, timeout_s=timeout_s)

    return send


async def closed(
    send: Send, prompts: Sequence[Prompt], clients: int, *, clock: Clock = time.perf_counter
) -> tuple[Record, ...]:
    """Each client asks again as soon as it has its answer; the next prompt is due at that moment."""
    waiting = iter(prompts)
    records: list[Record] = []

    async def client() -> None:
        for prompt in waiting:
            records.append(await send(prompt, clock()))

    await asyncio.gather(*(client() for _ in range(clients)))
    return tuple(records)


async def opened(
    send: Send,
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    *,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[Record, ...]:
    """Each prompt is sent at its time, counted from now, whatever became of the others."""
    start = clock()
    sent: list[asyncio.Task[Record]] = []
    for prompt, at_s in zip(prompts, arrivals_s, strict=True):
        await sleep(max(0.0, start + at_s - clock()))
        sent.append(asyncio.ensure_future(send(prompt, start + at_s)))
    return tuple(await asyncio.gather(*sent))


def arrivals(rate_rps: float, count: int, rng: Random) -> list[float]:
    """Seconds from the start, of a Poisson process."""
    at, found = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate_rps)
        found.append(at)
    return found
