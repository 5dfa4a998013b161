"""A streaming chat client that times every chunk, and watches whether it keeps up itself."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from load.record import Record, failure
from load.statistics import percentile

REQUEST_TIMEOUT_S: Final = 120.0
TIMEOUT: Final = "timeout"
BEAT_S: Final = 0.005

Clock = Callable[[], float]
Piece = tuple[float, bytes]
"""What one read of a stream brought, and when."""


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


def session() -> aiohttp.ClientSession:
    """A client without a limit on connections. Idle ones are dropped before any server drops them."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    return aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)


async def ask(
    http: aiohttp.ClientSession,
    target: Target,
    messages: list[dict[str, str]],
    max_tokens: int,
    due_s: float,
    *,
    clock: Clock = time.perf_counter,
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> Record:
    """One request. Whatever goes wrong is in the record: nothing is raised."""
    headers = {"content-type": "application/json"}
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    pieces: list[Piece] = []
    sent_s = clock()
    try:
        async with http.post(
            f"{target.base_url}/v1/chat/completions",
            data=json.dumps(body(target, messages, max_tokens)).encode(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as answer:
            if answer.status != 200:
                text = (await answer.read()).decode(errors="replace")
                return failure(due_s, sent_s, f"{answer.status}: {text[:300]}")
            async for data in answer.content.iter_any():
                pieces.append((clock(), data))  # read now, understood when nothing can be late any more
            request_id = answer.headers.get("x-request-id", "")
    except TimeoutError:
        return failure(due_s, sent_s, TIMEOUT)
    except (aiohttp.ClientError, OSError, ValueError) as bad:
        return failure(due_s, sent_s, repr(bad))
    return understood(pieces, due_s, sent_s, request_id)


async def ask_all(
    http: aiohttp.ClientSession, target: Target, prompts: Sequence[list[dict[str, str]]], max_tokens: int
) -> tuple[Record, ...]:
    """All at once: they are due now."""
    due_s = time.perf_counter()
    return tuple(await asyncio.gather(*(ask(http, target, prompt, max_tokens, due_s) for prompt in prompts)))


def understood(pieces: Sequence[Piece], due_s: float, sent_s: float, request_id: str) -> Record:
    """The record of a stream as it was read. An event came when the piece with the end of its line came."""
    chunks: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] | None = None
    finish: str | None = None
    end_s: float | None = None
    try:
        for now, payload in _payloads(pieces):
            if payload == b"[DONE]":
                end_s = now
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
    except ValueError as bad:
        return failure(due_s, sent_s, repr(bad))
    if end_s is None or not chunks or usage is None or finish is None:
        return failure(due_s, sent_s, "the stream ended early, or without text, usage or a finish reason")
    return Record(
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=tuple(chunks),
        end_s=end_s,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        finish_reason=finish,
        text="".join(texts),
        request_id=request_id,
    )


def _payloads(pieces: Sequence[Piece]) -> Iterator[Piece]:
    rest = b""
    for now, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[len(b"data:") :].strip()


class Pulse:
    """How late the client's event loop runs: it stamps arrivals no more precisely than that."""

    def __init__(self, *, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self.late_s: list[float] = []

    @property
    def late_ms_p99(self) -> float | None:
        return round(percentile(self.late_s, 0.99) * 1000, 2) if self.late_s else None

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
