"""Through HTTP, both engines and the token bus, the answer is that of one plain engine."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import ANSWER_TOKENS, Answers, Texts
from tests.support.prompts import PAGE
from tests.support.stack import Stack, busy, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.ray]


@pytest.fixture(scope="session")
def plain(model_dir: Path, answers: Answers) -> dict[int, str]:
    """The plain engine's answers as text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return {length: tokenizer.decode(ids, skip_special_tokens=True) for length, ids in answers.items()}


def ask(
    client: httpx.Client, stack: Stack, text: str, *, stream: bool = False
) -> tuple[str, int, httpx.Response]:
    """(answer, completion tokens, response) of a raw prompt."""
    body = {"prompt": text, "raw": True, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": stream}
    if not stream:
        answer = client.post(stack.run_url, json=body)
        assert answer.status_code == 200, answer.text
        result = answer.json()["result"]
        return result["response"], result["usage"]["completion_tokens"], answer
    with client.stream("POST", stack.run_url, json=body) as answer:
        events = events_of(answer)
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])["usage"]
    text = "".join(json.loads(event).get("response", "") for event in events[:-1])
    return text, usage["completion_tokens"], answer


def events_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def test_a_lost_bus_frame_is_refetched_and_the_answer_is_whole(
    client: httpx.Client, stack: Stack, texts: Texts, plain: dict[int, str], answers: Answers
) -> None:
    """Must run first: decode loses its third frame with tokens, once."""
    text, count, answer = ask(client, stack, texts[PAGE + 1][0], stream=True)
    summary = stack.summary(answer)

    assert summary["refetches"] >= 1
    assert (text, count) == (plain[PAGE + 1], len(answers[PAGE + 1]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_every_length_around_a_page_answers_as_one_plain_engine(
    client: httpx.Client, stack: Stack, texts: Texts, plain: dict[int, str], answers: Answers, stream: bool
) -> None:
    """In the order A, B, A: each text comes twice, once in each form; the second finds its pages in decode's
    cache."""
    for length, (text, _ids) in texts.items():
        got, count, answer = ask(client, stack, text, stream=stream)

        assert (got, count) == (plain[length], len(answers[length])), f"{length} tokens"
        summary = stack.summary(answer)
        assert summary["prompt_tokens"] == length
        # An answer that decode computed by itself would be right, and would prove nothing.
        assert summary["handoff"] != "recomputed"
        assert summary["pages"] or length % PAGE in (0, 1) or length < PAGE


def test_eight_at_once_answer_as_each_alone(
    client: httpx.Client, stack: Stack, texts: Texts, plain: dict[int, str]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(lambda text: ask(client, stack, text, stream=True)[0], [t for t, _ in texts.values()])
        )

    assert dict(zip(texts, got, strict=True)) == plain
    eventually(lambda: busy(stack.control("/status").json()), lambda held: held == [])


def test_pages_travel_from_prefill_to_decode(client: httpx.Client, stack: Stack) -> None:
    """A prompt that nobody has sent before: 100 words and more are several pages."""
    body = {"prompt": "Count: " + " ".join(map(str, range(150))), "max_tokens": 2, "temperature": 0}
    summary = stack.summary(client.post(stack.run_url, json=body))
    replicas = {row["phase"]: row["id"] for row in stack.status()["replicas"]}

    assert summary["handoff"] == "shipped"
    assert summary["pages"] == -(-(summary["prompt_tokens"] - 1) // PAGE)
    page_bytes = summary["wire_bytes"] / summary["pages"]
    assert page_bytes == 30 * 3 * PAGE * 128 * 4  # layers, heads, slots, K and V elements, float32
    assert (summary["prefill_replica"], summary["decode_replica"]) == (
        replicas["prefill"],
        replicas["decode"],
    )


def test_openai_client_completes_a_chat_whole_and_streamed(stack: Stack) -> None:
    with openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=stack.api_key, max_retries=0) as client:
        asked: dict[str, Any] = {
            "model": stack.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)

    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_stop_string_ends_the_answer_before_it_and_frees_the_engines(
    client: httpx.Client, stack: Stack
) -> None:
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "stop": " is",
        "temperature": 0,
        "max_tokens": 200,
    }
    answer = client.post(stack.chat_url, json=body).json()

    assert answer["choices"][0]["message"]["content"] == "The capital of France"
    assert answer["choices"][0]["finish_reason"] == "stop"
    eventually(lambda: busy(stack.control("/status").json()), lambda held: held == [], within_s=2)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_both_engines_within_two_seconds(
    client: httpx.Client, stack: Stack, stream: bool
) -> None:
    body = {
        "prompt": "Write a long story about a river. " * 20,
        "max_tokens": 2000,
        "stream": stream,
        "temperature": 0.9,
    }
    with socket.create_connection(address_of(stack.base_url)) as connection:
        connection.sendall(request_bytes(stack, body))
        eventually(lambda: stack.control("/status").json(), decoding, within_s=30)

    eventually(lambda: busy(stack.control("/status").json()), lambda held: held == [], within_s=2)


def address_of(url: str) -> tuple[str, int]:
    parts = httpx.URL(url)
    assert parts.port is not None
    return parts.host, parts.port


def request_bytes(stack: Stack, body: dict[str, Any]) -> bytes:
    content = json.dumps(body)
    lines = [
        f"POST {httpx.URL(stack.run_url).raw_path.decode()} HTTP/1.1",
        f"host: {httpx.URL(stack.base_url).netloc.decode()}",
        f"authorization: Bearer {stack.api_key}",
        "content-type: application/json",
        f"content-length: {len(content)}",
    ]
    return ("\r\n".join(lines) + "\r\n\r\n" + content).encode()


def decoding(status: dict[str, Any]) -> bool:
    """Decode computes tokens: the pages have come, prefill is done."""
    rows = {row["phase"]: row for row in status["replicas"]}
    return rows["decode"]["running"] == 1 and rows["prefill"]["running"] == 0
