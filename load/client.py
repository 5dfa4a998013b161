"""A streaming chat client that times every chunk, and watches whether it keeps up itself."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from load.record import Record, failure
from load.statistics import percentile

REQUEST_TIMEOUT_S: Final = 120.0
BEAT_S: Final = 0.005

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the OpenAI chat API."""

    name: str
    base_url: str
    """Without `/v1`."""
    model: str
    api_key: str = field(default="", repr=False)


def body(target: Target, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """Greedy and streamed, with the server's own token counts at the end."""
    return {
        "model": target.model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(
    http: httpx.AsyncClient,
    target: Target,
    messages: list[dict[str, str]],
    max_tokens: int,
    due_s: float,
    *,
    clock: Clock = time.perf_counter,
) -> Record:
    """One request. Whatever goes wrong is in the record: nothing is raised."""
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    sent_s = clock()
    try:
        async with http.stream(
            "POST",
            f"{target.base_url}/v1/chat/completions",
            json=body(target, messages, max_tokens),
            headers=headers,
            timeout=REQUEST_TIMEOUT_S,
        ) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return failure(due_s, sent_s, f"{answer.status_code}: {text[:300]}")
            return await _read(answer, due_s, sent_s, clock)
    except (httpx.HTTPError, ValueError) as bad:
        return failure(due_s, sent_s, repr(bad))


async def ask_all(
    http: httpx.AsyncClient, target: Target, prompts: Sequence[list[dict[str, str]]], max_tokens: int
) -> tuple[Record, ...]:
    """All at once: they are due now."""
    due_s = time.perf_counter()
    return tuple(await asyncio.gather(*(ask(http, target, prompt, max_tokens, due_s) for prompt in prompts)))


async def _read(answer: httpx.Response, due_s: float, sent_s: float, clock: Clock) -> Record:
    chunks: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    finish: str | None = None
    done = False
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        now = clock()
        payload = line[len("data:") :].strip()
        if payload == "[DONE]":
            done = True
            break
        event = json.loads(payload)
        if "error" in event:
            return failure(due_s, sent_s, f"in the stream: {event['error']}")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            finish = choice.get("finish_reason") or finish
            if text := choice.get("delta", {}).get("content"):
                chunks.append(now)
                texts.append(text)
    if not done or not chunks or usage is None or finish is None:
        return failure(due_s, sent_s, "the stream ended early, or without text, usage or a finish reason")
    return Record(
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=tuple(chunks),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        finish_reason=finish,
        text="".join(texts),
        request_id=answer.headers.get("x-request-id", ""),
    )


class Pulse:
    """How late the client's event loop runs: it stamps arrivals no more precisely than that."""

    def __init__(self, *, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.late_s: list[float] = []

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            due = self._clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.late_s.append(max(0.0, self._clock() - due))


def objections(late_s: Sequence[float], sent_late_s: Sequence[float], shortest_ttft_s: float) -> list[str]:
    """Why the client's own times cannot be trusted; empty when they can.

    Args:
        late_s: delays of the client's event loop.
        sent_late_s: delays between when requests were due and when they were sent.
        shortest_ttft_s: the smallest median that the run reports.
    """
    allowed = max(0.005, 0.05 * shortest_ttft_s)
    found = []
    for name, values in (("event loop was", late_s), ("requests were sent", sent_late_s)):
        if not values:
            found.append(f"nothing is known of how late the {name}")
        elif (worst := percentile(values, 0.99)) > allowed:
            found.append(
                f"{name} {worst * 1000:.1f} ms late at the 99th percentile; {allowed * 1000:.1f} ms allowed"
            )
    return found
