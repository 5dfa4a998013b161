"""One streamed chat request, timed from outside."""

import json
import time
from dataclasses import dataclass

import httpx


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-compatible server."""

    name: str
    base_url: str
    model: str
    api_key: str = "none"


@dataclass(frozen=True, slots=True)
class Record:
    """Times in seconds from when the request was due."""

    target: str
    prompt_tokens: int
    output_tokens: int
    text_s: tuple[float, ...]
    """Arrival of each piece of text."""
    request_id: str
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.text_s[0]

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first one."""
        return (self.output_tokens - 1) / (self.text_s[-1] - self.text_s[0])


def chat(client: httpx.Client, target: Target, prompt: str, *, max_tokens: int) -> Record:
    """Send now, read to the end. A failed request is a record with an error, never an exception."""
    due = time.perf_counter()
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, int] = {}
    request_id, error = "", None
    headers = {"authorization": f"Bearer {target.api_key}"}
    try:
        with client.stream(
            "POST", f"{target.base_url}/v1/chat/completions", json=body, headers=headers
        ) as answer:
            request_id = answer.headers.get("x-request-id", "")
            if answer.status_code != 200:
                error = f"{answer.status_code}: {answer.read()[:200]!r}"
            else:
                done = _read(answer, due, times, usage)
                error = None if done and len(times) > 1 else "the stream ended early"
    except httpx.HTTPError as failed:
        error = repr(failed)
    return Record(
        target.name,
        usage.get("prompt_tokens", 0),
        usage.get("completion_tokens", 0),
        tuple(times),
        request_id,
        error,
    )


def _read(answer: httpx.Response, due: float, times: list[float], usage: dict[str, int]) -> bool:
    """True when the stream ended with its `[DONE]`."""
    for line in answer.iter_lines():
        if line == "data: [DONE]":
            return True
        if not line.startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        usage.update({k: v for k, v in (event.get("usage") or {}).items() if isinstance(v, int)})
        if any(choice["delta"].get("content") for choice in event.get("choices", ())):
            times.append(time.perf_counter() - due)
    return False
