"""`phasegate chat`: a conversation with the running model, printed as it streams."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx


class ChatError(Exception):
    """The answer failed or broke off. The message says how."""


def stream_chat(
    local: dict[str, Any], messages: list[dict[str, str]], *, max_tokens: int, temperature: float
) -> Iterator[str]:
    """Pieces of the answer's text.

    Raises:
        ChatError: the request was refused, or the stream ended before its time.
    """
    body = {
        "model": local["models"][0],
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
    }
    headers = {"authorization": f"Bearer {local['api_key']}"}
    url = f"{local['base_url']}/v1/chat/completions"
    try:
        with (
            httpx.Client(timeout=httpx.Timeout(30, read=600), trust_env=False) as client,
            client.stream("POST", url, json=body, headers=headers) as answer,
        ):
            if answer.status_code != 200:
                raise ChatError(f"HTTP {answer.status_code}: {_message(answer.read())}")
            yield from _pieces(answer.iter_lines())
    except httpx.HTTPError as bad:
        raise ChatError(f"no answer from {url}: {bad}") from None


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                yield text
    raise ChatError("the stream broke off")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:200]


def converse(local: dict[str, Any], message: str | None, max_tokens: int, temperature: float) -> int:
    """One answer to `message`; without one, a conversation until the end of the input."""
    if message is not None:
        _answer(local, [{"role": "user", "content": message}], max_tokens, temperature)
        return 0
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return 0
        if said:
            messages.append({"role": "user", "content": said})
            messages.append(
                {"role": "assistant", "content": _answer(local, messages, max_tokens, temperature)}
            )


def _answer(
    local: dict[str, Any], messages: list[dict[str, str]], max_tokens: int, temperature: float
) -> str:
    whole = ""
    for piece in stream_chat(local, messages, max_tokens=max_tokens, temperature=temperature):
        whole += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return whole
