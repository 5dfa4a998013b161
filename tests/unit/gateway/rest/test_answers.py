"""What a client gets from both dialects, through the real HTTP surface, bus and dispatch."""

import openai
import pytest

from tests.support.engine_pool import Script
from tests.support.gateways import (
    ACCOUNT,
    ASK,
    AUTH,
    CHAT,
    CHAT_ASK,
    KEY,
    MODEL,
    RUN,
    events,
    running_gateway,
)


async def test_native_answer_is_text_and_usage_in_the_envelope() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "result": {
            "response": "Hello, world.",
            "usage": {
                "prompt_tokens": 8,
                "completion_tokens": 14,
                "total_tokens": 22,
                "prompt_tokens_details": {"cached_tokens": 7},
                "completion_tokens_details": {"reasoning_tokens": 0},
            },
        },
        "success": True,
        "errors": [],
        "messages": [],
    }


async def test_native_stream_ends_with_usage_and_done() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN, json=ASK | {"stream": True}, headers=AUTH)

    *texts, last, done = events(answer)
    assert answer.headers["content-type"] == "text/event-stream"
    assert "".join(event["response"] for event in texts) == "Hello, world."
    assert all(set(event) == {"response", "p"} for event in texts)
    assert last["usage"]["completion_tokens"] == 14
    assert done == "[DONE]"


async def test_openai_stream_has_one_role_one_finish_and_usage_without_choices() -> None:
    ask = CHAT_ASK | {"stream": True, "stream_options": {"include_usage": True}}
    async with running_gateway() as gateway:
        answer = await gateway.client.post(CHAT, json=ask, headers=AUTH)

    first, *middle, finish, usage, done = events(answer)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in middle) == "Hello, world."
    assert all(event["choices"][0]["finish_reason"] is None for event in (first, *middle))
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 22
    assert done == "[DONE]"


async def test_openai_stream_has_no_usage_unless_asked_for() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"stream": True}, headers=AUTH)

    assert not any("usage" in event for event in events(answer)[:-1])


async def test_openai_client_completes_a_chat_streamed_and_not() -> None:
    async with running_gateway() as gateway:
        client = openai.AsyncOpenAI(
            api_key=KEY,
            base_url=f"http://gateway/client/v4/accounts/{ACCOUNT}/ai/v1",
            http_client=gateway.client,
        )
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
        stream = await client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        listed = [model.id async for model in client.models.list()]

    assert whole.choices[0].message.content == streamed == "Hello, world."
    assert whole.choices[0].finish_reason == "stop"
    assert MODEL in listed


async def test_characters_of_several_tokens_are_never_split() -> None:
    async with running_gateway(Script(answer="naïve 🦜 日本", chunk=1)) as gateway:
        answer = await gateway.client.post(RUN, json=ASK | {"stream": True}, headers=AUTH)

    texts = [event["response"] for event in events(answer)[:-2]]
    assert "".join(texts) == "naïve 🦜 日本"
    assert "�" not in answer.text


async def test_answer_cut_by_max_tokens_says_length_and_counts_its_tokens() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"max_tokens": 4}, headers=AUTH)

    assert answer.json()["choices"][0]["message"]["content"] == "Hell"
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_ends_the_answer_cancels_the_engine_and_bills_up_to_its_last_token(
    stream: bool,
) -> None:
    script = Script(answer="one STOP two three", chunk=4, hold_at=3)
    async with running_gateway(script) as gateway:
        ask = CHAT_ASK | {"stop": ["STOP"], "stream": stream, "stream_options": {"include_usage": True}}
        answer = await gateway.client.post(CHAT, json=ask, headers=AUTH)
        cancelled = gateway.pool.cancelled["decode"]

    if stream:
        whole = events(answer)
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in whole[:-2])
        usage, reason = whole[-2]["usage"], whole[-3]["choices"][0]["finish_reason"]
    else:
        choice = answer.json()["choices"][0]
        text, usage, reason = choice["message"]["content"], answer.json()["usage"], choice["finish_reason"]
    assert (text, reason, usage["completion_tokens"]) == ("one ", "stop", len("one STOP"))
    assert cancelled == 1


async def test_prefill_and_decode_get_the_same_prompt_transfer_and_salt() -> None:
    async with running_gateway() as gateway:
        await gateway.client.post(RUN, json=ASK | {"cache_salt": "mine"}, headers=AUTH)
        (prefill,), (decode,) = gateway.pool.prefills, gateway.pool.decodes

    assert prefill.token_ids == decode.token_ids
    assert prefill.transfer_id == decode.transfer_id
    assert (prefill.decode_engine, decode.prefill_engine) == ("engine-d1", "engine-p1")
    assert prefill.cache_salt == decode.cache_salt == "salt/mine"
    assert len(decode.request_id) == 32


async def test_prompt_of_one_token_is_not_prefilled_elsewhere() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN, json={"prompt": "x", "raw": True}, headers=AUTH)
        (decode,) = gateway.pool.decodes
        prefills = gateway.pool.prefills

    assert answer.status_code == 200
    assert (prefills, decode.transfer_id, decode.prefill_engine) == ([], None, None)


async def test_bare_prompt_is_a_user_message_unless_raw() -> None:
    async with running_gateway() as gateway:
        await gateway.client.post(RUN, json={"prompt": "hey"}, headers=AUTH)
        await gateway.client.post(RUN, json={"prompt": "hey", "raw": True}, headers=AUTH)
        templated, raw = (bytes(request.token_ids) for request in gateway.pool.decodes)

    assert (templated, raw) == (b"user:hey\n", b"hey")
