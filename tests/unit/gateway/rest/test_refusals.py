"""What a client is refused, in what words, and that nothing reached an engine."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.support.asgi import Exchange
from tests.support.gateways import (
    ACCOUNT,
    AUTH,
    CHAT,
    LIMITED_KEY,
    MODEL,
    OTHER_MODEL,
    RUN,
    running_gateway,
)

MESSAGES = [{"role": "user", "content": "secret words"}]
ASK: dict[str, Any] = {"messages": MESSAGES}
CHAT_ASK: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}


async def post(path: str, **request: Any) -> httpx.Response:
    """The answer to one request; asserts that no engine was called and that the error body is whole."""
    async with running_gateway() as gateway:
        answer = await gateway.client.post(path, **({"headers": AUTH} | request))
        assert not gateway.pool.decodes
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"]
    assert (body["success"], body["result"], body["messages"]) == (False, None, [])
    assert body["errors"][0]["message"] == body["error"]["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "secret words" not in answer.text
    return answer


@pytest.mark.parametrize(
    ("change", "param", "phrase"),
    [
        ({"temperature": 6}, "temperature", "'/temperature' must be <= 5"),
        ({"temperature": "hot"}, "temperature", "'/temperature' must be a number"),
        ({"top_p": 0}, "top_p", "'/top_p' must be >= 0.001"),
        ({"top_k": -2}, "top_k", "'/top_k' must be >= -1"),
        ({"top_k": 300}, "top_k", "'/top_k' must be <= 257"),
        ({"seed": -1}, "seed", "must be >= 0"),
        ({"max_tokens": 0}, "max_tokens", "must be >= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "must be an integer"),
        ({"max_tokens": 10**4300 - 1}, "max_tokens", "must be <="),
        ({"max_completion_tokens": 10**4300 - 1}, "max_completion_tokens", "must be <="),
        ({"max_tokens": True}, "max_tokens", "must be an integer"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "not both"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"stop": ["a", 5]}, "stop[1]", "'/stop/1' must be a string"),
        ({"n": 2}, "n", "'/n' must be 1"),
        ({"stream": "yes"}, "stream", "must be a boolean"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must be > 0"),
        ({"frequency_penalty": 3}, "frequency_penalty", "must be <= 2"),
        ({"store": True}, "store", "must be False"),
        ({"messages": {"role": "user"}}, "messages", "'/messages' must be an array"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required properties at '/messages/0'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'system', 'user'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "valid Unicode"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "must be 'text'",
        ),
        ({"tools": []}, "tools", "'/tools' is not supported by this model"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"logprobs": True}, "logprobs", "not supported"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params", "'/kv_transfer_params' is not a known"),
        ({"extra_args": {}}, "extra_args", "not a known property"),
        ({"chat_template": "{{ x }}"}, "chat_template", "not a known property"),
        ({"priority": 1}, "priority", "not a known property"),
        ({"list": 1}, "list", "'/list' is not a known property"),
        ({"chat_template_kwargs": {"evil": 1}}, "chat_template_kwargs.evil", "not a known property"),
    ],
)
@pytest.mark.parametrize("path", [RUN, CHAT])
async def test_bad_field_is_refused_by_name(
    path: str, change: dict[str, Any], param: str, phrase: str
) -> None:
    body = (CHAT_ASK if path == CHAT else ASK) | change
    headers = AUTH | {"content-type": "application/json"}
    answer = await post(path, content=json.dumps(body), headers=headers)

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, 5006)
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["message"].startswith("AiError: Bad input: Error: ")
    assert phrase in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"prediction": None, "unheard_of": None, "stop": None, "tools": None},
        {"chat_template_kwargs": {"thinking": True}, "reasoning_effort": "low"},
        {"options": {"rejectIfBusy": True}, "prompt_cache_key": "s", "top_k": -1, "temperature": 0},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": None}]}]},
        {"stream_options": {"include_usage": None}, "options": {"other": None}},
        {"stop": "x", "seed": 2**63 - 1, "stream_options": {"include_obfuscation": True}},
    ],
)
async def test_harmless_fields_are_accepted(extra: dict[str, Any]) -> None:
    async with running_gateway() as gateway:
        answers = [
            await gateway.client.post(RUN, json=ASK | extra, headers=AUTH),
            await gateway.client.post(CHAT, json=CHAT_ASK | extra, headers=AUTH),
        ]

    assert [answer.status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize(
    ("raw", "phrase"),
    [
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid UTF-8"),
        (b"[]", "'/' must be an object"),
        (b'{"prompt": "a", "prompt": "b"}', "names a key twice"),
        (b'{"temperature": NaN}', "not valid JSON"),
        (b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
        (b"{}", "'prompt' or 'messages'"),
        (b'{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "oneOf at '/' not met"),
    ],
)
async def test_bad_body_is_refused_with_what_is_wrong(raw: bytes, phrase: str) -> None:
    answer = await post(RUN, content=raw)

    assert answer.status_code == 400
    assert phrase in answer.json()["error"]["message"]


async def test_empty_body_is_refused() -> None:
    answer = await post(RUN, content=b"")

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, 3003)


@pytest.mark.parametrize("announced", [True, False])
async def test_body_over_the_limit_is_refused(announced: bool) -> None:
    raw = b'{"prompt": "' + b"x" * 200_000 + b'"}'

    async def chunks() -> Any:
        for at in range(0, len(raw), 10_000):
            yield raw[at : at + 10_000]

    answer = await post(RUN, content=raw if announced else chunks())

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (413, 3006)


async def test_a_body_that_is_announced_too_long_is_refused_before_it_comes() -> None:
    async with running_gateway() as gateway:
        exchange = Exchange(gateway.app, RUN, ASK, AUTH | {"content-length": "10000000"}, whole=False)
        start = await exchange.message()
        await asyncio.wait_for(exchange.task, 5)

    assert start["status"] == 413


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "total"),
    [({"max_tokens": 193}, "201"), ({"messages": [{"role": "user", "content": "x" * 250}]}, "257")],
)
async def test_context_overflow_is_a_status_with_both_numbers_also_when_streaming(
    stream: bool, change: dict[str, Any], total: str
) -> None:
    short: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
    answer = await post(CHAT, json=short | {"model": MODEL} | change)

    message = answer.json()["error"]["message"]
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, 5021)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "This model's maximum context length is 200 tokens. However, you requested" in message
    assert f"maximum output tokens ({total}) exceeded this model context window limit (200)" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 250}, "prompt"),
        ({"prompt": "x" * 250, "raw": True}, "prompt"),
        ({"prompt": "x" * 25_000, "raw": True}, "prompt"),
        ({"prompt": "x" * 25_000}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 25_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 250}]}, "messages"),
        ({"prompt": "hi", "max_tokens": 199}, "max_tokens"),
    ],
)
async def test_context_overflow_names_the_field_that_does_not_fit(body: dict[str, Any], param: str) -> None:
    answer = await post(RUN, json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_default_answer_length_is_cut_to_what_remains() -> None:
    async with running_gateway() as gateway:
        await gateway.client.post(RUN, json={"prompt": "x" * 100, "raw": True}, headers=AUTH)
        (decode,) = gateway.pool.decodes

    assert decode.sampling.max_tokens == 100


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer pg_wrong"},
        {"authorization": AUTH["authorization"].replace("Bearer", "Basic")},
        {"authorization": AUTH["authorization"].removeprefix("Bearer ")},
        {"x-api-key": "pg_" + "z" * 43},
    ],
)
@pytest.mark.parametrize("path", [RUN, CHAT, "/v1/models", "/tokenize", "/invocations", "/", "/healthz/x"])
async def test_without_a_good_key_nothing_is_told_and_the_key_is_not_echoed(
    headers: dict[str, str], path: str
) -> None:
    answer = await post(path, json=ASK, headers=headers)

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (401, 10000)
    assert "pg_" not in answer.text


async def test_key_in_x_api_key_is_good_too() -> None:
    key = AUTH["authorization"].removeprefix("Bearer ")
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers={"x-api-key": key})

    assert answer.status_code == 200


async def test_foreign_account_is_refused() -> None:
    answer = await post(RUN.replace(ACCOUNT, "b" * 32), json=ASK)

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (403, 10000)


async def test_unreachable_key_store_is_503_with_retry_after() -> None:
    async with running_gateway() as gateway:
        gateway.keys.reachable = False
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
    assert int(answer.headers["retry-after"]) > 0


async def test_unknown_model_is_refused_in_each_dialects_way() -> None:
    native = await post(RUN.replace(MODEL, "@cf/example/none"), json=ASK)
    chat = await post(CHAT, json=CHAT_ASK | {"model": "none"})

    assert (native.status_code, native.json()["errors"][0]["code"]) == (400, 5007)
    assert (chat.status_code, chat.json()["errors"][0]["code"]) == (404, 3042)
    assert chat.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RUN, ASK),
        (RUN, ASK | {"model": OTHER_MODEL}),
        (RUN.replace(MODEL, OTHER_MODEL), ASK | {"model": MODEL}),
        (RUN.replace(MODEL, OTHER_MODEL) + f"?model={MODEL}", ASK),
        (CHAT, CHAT_ASK),
        (CHAT + f"?model={MODEL}", CHAT_ASK | {"model": OTHER_MODEL}),
    ],
)
async def test_every_model_that_a_request_names_must_be_allowed_for_the_key(
    path: str, body: dict[str, Any]
) -> None:
    answer = await post(path, json=body, headers={"authorization": f"Bearer {LIMITED_KEY}"})

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (403, 5018)


async def test_request_that_names_two_allowed_models_is_refused() -> None:
    answer = await post(RUN, json=ASK | {"model": OTHER_MODEL})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(
    "model", [MODEL, MODEL.replace("/", "%2F"), MODEL.replace("@", "%40"), MODEL.replace("/", "%2f")]
)
async def test_literal_and_encoded_model_paths_reach_the_same_model(model: str) -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN.replace(MODEL, model), json=ASK, headers=AUTH)

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "model",
    [
        MODEL.replace("/", "%252F"),
        MODEL.replace("@", "%2540"),
        "@cf/example/x/%2e%2e/small",
        "%2e%2e/run/" + MODEL,
        "/" + MODEL,
        MODEL + "/",
        MODEL.upper(),
        "",
    ],
)
async def test_twice_encoded_paths_and_dot_segments_reach_no_model(model: str) -> None:
    answer = await post(RUN.replace(MODEL, model), json=ASK)

    assert answer.status_code in (400, 404)


async def test_unknown_route_and_wrong_method_have_the_error_body() -> None:
    async with running_gateway() as gateway:
        missing = await gateway.client.get("/nowhere", headers=AUTH)
        wrong = await gateway.client.get(CHAT, headers=AUTH)

    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


async def test_health_needs_no_key_and_readiness_needs_both_phases() -> None:
    async with running_gateway(attach=False) as gateway:
        before = await gateway.client.get("/readyz")
        alive = await gateway.client.get("/healthz")
        unplaced = await gateway.client.post(RUN, json=ASK, headers=AUTH)
    async with running_gateway() as gateway:
        after = await gateway.client.get("/readyz")

    assert (alive.status_code, before.status_code, after.status_code) == (200, 503, 200)
    assert (unplaced.status_code, unplaced.json()["error"]["code"]) == (503, "engines_unavailable")


@pytest.mark.parametrize(
    ("label", "kept"), [("trace-1", True), ("two words", False), ("x" * 129, False), ("<script>", False)]
)
async def test_request_label_is_returned_if_harmless(label: str, kept: bool) -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.get("/healthz", headers={"x-request-id": label})

    assert (answer.headers["x-request-id"] == label) is kept
    assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"]
