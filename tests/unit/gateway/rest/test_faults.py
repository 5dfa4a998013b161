"""What a client gets when engines fail, frames are lost or somebody leaves, through the real HTTP surface,
bus and dispatch."""

import asyncio
import json
from typing import Any

import pytest

from gateway.errors import ApiError
from gateway.telemetry import Telemetry
from tests.support.asgi import Exchange
from tests.support.engine_pool import Script
from tests.support.gateways import ASK, AUTH, CHAT, CHAT_ASK, RUN, events, running_gateway
from workers.api import FaultKind


async def test_failed_prefill_restarts_decode_alone() -> None:
    script, telemetry = Script(prefill_fault=FaultKind.INTERNAL, wait_for_prefill=True), Telemetry()
    async with running_gateway(script, telemetry=telemetry) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        first, second = gateway.pool.decodes
        summary = gateway.summaries.get(answer.headers["x-request-id"])

    assert answer.json()["result"]["response"] == "Hello, world."
    assert (first.attempt, second.attempt, second.transfer_id) == (0, 1, None)
    assert second.deadline_s < first.deadline_s, "what the first one took is gone"
    assert summary
    assert summary["attempts"] == 2
    assert 'phasegate_decode_alone_total{reason="prefill_failed"} 1.0' in telemetry.metrics.page(0).decode()


async def test_prefill_that_still_runs_at_the_first_token_is_cancelled() -> None:
    async with running_gateway(Script(prefill_hangs=True)) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        cancelled = gateway.pool.cancelled["prefill"]

    assert answer.status_code == 200
    assert cancelled == 1


@pytest.mark.parametrize("lost", [{0}, {2}, {4}, {0, 1, 2, 3, 4}])
async def test_lost_frames_are_fetched_again_and_the_text_is_whole(lost: set[int]) -> None:
    async with running_gateway(Script(lose=lost)) as gateway:
        answer = await gateway.client.post(RUN, json=ASK | {"stream": True}, headers=AUTH)
        refetched = gateway.pool.refetched_from

    *texts, _, done = events(answer)
    assert "".join(event["response"] for event in texts) == "Hello, world."
    assert done == "[DONE]"
    assert refetched[0] == min(lost) * 3


async def test_lost_frame_that_nobody_remembers_ends_the_stream_in_an_error_not_a_hole() -> None:
    async with running_gateway(Script(lose={2}, forget=True)) as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"stream": True}, headers=AUTH)

    _, *texts, error = events(answer)
    assert "".join(event["choices"][0]["delta"]["content"] for event in texts) == "Hello,"
    assert error["error"]["code"] == "stream_incomplete"
    assert "[DONE]" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_fault_before_the_first_token_is_a_status_also_when_streaming(stream: bool) -> None:
    async with running_gateway(Script(fault=FaultKind.BUSY)) as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"stream": stream}, headers=AUTH)

    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (429, 3040)
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("fault", "code"),
    [(FaultKind.ENGINE_DEAD, "engine_lost"), (FaultKind.PAGE_INTEGRITY, "page_integrity")],
)
async def test_fault_after_the_first_token_is_an_event_and_no_done(fault: FaultKind, code: str) -> None:
    async with running_gateway(Script(fault=fault, hold_at=2)) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        start = await exchange.message()
        gateway.pool.script.release.set()
        await asyncio.wait_for(exchange.task, 5)
        bodies = b"".join([body async for body in _rest(exchange)])
        request_id = dict(start["headers"])[b"x-request-id"].decode()
        summary = gateway.summaries.get(request_id)

    assert start["status"] == 200
    assert f'"code":"{code}"'.encode() in bodies.split(b"\n\n")[-2]
    assert b"[DONE]" not in bodies
    assert summary
    assert summary["status"] == code


async def test_replica_on_its_way_out_finishes_its_streams() -> None:
    script = Script(hold_at=2)
    async with running_gateway(script) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        assert (await exchange.message())["status"] == 200
        await exchange.message()
        gateway.pool.present = dict.fromkeys(gateway.pool.present, ())
        gateway.fleet.refresh(gateway.bus.address)
        refused = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        script.release.set()
        await asyncio.wait_for(exchange.task, 5)
        bodies = [exchange_body async for exchange_body in _rest(exchange)]

    assert b"[DONE]" in b"".join(bodies)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engines_unavailable")


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels_both_engines(stream: bool) -> None:
    """Streams are left after their first text; other requests while they wait for theirs."""
    async with running_gateway(Script(hold_at=1 if stream else 0, prefill_hangs=not stream)) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": stream}, AUTH)
        if stream:
            await exchange.message()
            await exchange.message()
        await gateway.pool.decoding.wait()
        exchange.hang_up()
        await asyncio.wait_for(exchange.task, 5)

        assert gateway.pool.cancelled["decode"] == 1
        assert gateway.pool.cancelled["prefill"] == (not stream)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (Script(fault=FaultKind.BUSY), 429),
        (Script(fault=FaultKind.ENGINE_DEAD), 502),
        (Script(answer="Yes."), 200),
    ],
    ids=["refused", "lost", "answered"],
)
async def test_prefill_lets_go_of_pages_when_decode_never_comes_for_them(script: Script, status: int) -> None:
    """Only the gateway knows: decode refused the request before its engine saw it."""
    async with running_gateway(script) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        transfers = [request.transfer_id for request in gateway.pool.prefills]

        assert answer.status_code == status
        assert gateway.pool.released == ([] if status == 200 else transfers)


@pytest.mark.parametrize(
    "script",
    [Script(peer_unknown=True), Script(prefill_fault=FaultKind.CANCELLED, wait_for_prefill=True)],
    ids=["decode does not find prefill", "prefill's call is cut off"],
)
async def test_prefill_lets_go_of_its_pages_as_soon_as_decode_begins_again_alone(script: Script) -> None:
    """Its pages may be computed and held: while decode answers without them they would serve nobody."""
    script.hold_at = 1
    async with running_gateway(script) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        assert (await exchange.message())["status"] == 200
        await exchange.message()
        released = list(gateway.pool.released)
        script.release.set()
        await asyncio.wait_for(exchange.task, 5)

        assert released == [request.transfer_id for request in gateway.pool.prefills]
        assert gateway.pool.released == released
        assert gateway.pool.decodes[-1].attempt == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_never_answers_for_lost_tokens_ends_the_request_with_an_error(
    stream: bool,
) -> None:
    async with running_gateway(Script(lose={2}, aside_hangs=True), patience_s=0.05) as gateway:
        answer = await gateway.client.post(RUN, json=ASK | {"stream": stream}, headers=AUTH)

    if stream:
        assert events(answer)[-1]["error"]["code"] == "stream_incomplete"
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_incomplete")


async def test_an_engine_that_never_answers_a_release_holds_nothing_here() -> None:
    telemetry = Telemetry()
    script = Script(fault=FaultKind.BUSY, aside_hangs=True)
    async with running_gateway(script, telemetry=telemetry, patience_s=0.05) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    late = 'phasegate_engine_answers_failed_total{fault="deadline",phase="prefill"} 1.0'
    assert answer.status_code == 429
    assert late in telemetry.metrics.page(0).decode()


@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError, ConnectionResetError])
@pytest.mark.parametrize("path", [RUN, CHAT])
async def test_a_fault_of_our_own_in_a_stream_is_an_event_and_not_its_silent_end(
    path: str, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(token_id: int) -> str | None:
        if token_id == ord("w"):
            raise kind("something of the prompt")
        return chr(token_id)

    script = Script(hold_at=1)
    async with running_gateway(script) as gateway:
        gateway.app.state.services.models[0].renderer.texts().get = broken
        exchange = Exchange(gateway.app, path, CHAT_ASK | {"stream": True}, AUTH)
        assert (await exchange.message())["status"] == 200
        script.release.set()
        await asyncio.wait_for(exchange.task, 5)
        body = b"".join([part async for part in _rest(exchange)]).decode()

    *_, last, nothing = body.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert nothing == ""
    assert "something of the prompt" not in body
    assert "stream.failed" in caplog.text


async def _until_ready(gateway: Any) -> None:
    async with asyncio.timeout(5):
        while (await gateway.client.get("/readyz")).status_code != 200:  # noqa: ASYNC110 - as a client sees it
            await asyncio.sleep(0.01)


async def test_while_no_decode_engine_is_ready_requests_are_refused_at_once_with_a_time_to_come_again() -> (
    None
):
    """The first one finds the engine dead, which Serve will not know for a while."""
    script = Script(fault=FaultKind.ENGINE_DEAD)
    async with running_gateway(script) as gateway:
        first = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        refused = await gateway.client.post(RUN, json=ASK, headers=AUTH)

        assert first.status_code == 502
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engines_unavailable")
        assert refused.headers["retry-after"].isdigit()
        assert len(gateway.pool.decodes) == 1
        script.fault = None
        await gateway.pool.heartbeat("d1")
        await _until_ready(gateway)
        again = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        assert again.status_code == 200


async def test_while_no_prefill_engine_is_ready_decode_computes_the_prompts_itself() -> None:
    script, telemetry = Script(prefill_fault=FaultKind.ENGINE_DEAD), Telemetry()
    async with running_gateway(script, telemetry=telemetry) as gateway:
        first = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        alone = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        asked_alone = gateway.pool.decodes[-1]
        page = telemetry.metrics.page(0).decode()
        script.prefill_fault = None
        await gateway.pool.heartbeat("p1")
        await _until_ready(gateway)
        again = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    answers = [answer.json()["result"]["response"] for answer in (first, alone, again)]
    assert answers == ["Hello, world."] * 3
    assert (asked_alone.attempt, asked_alone.transfer_id, asked_alone.prefill_engine) == (0, None, None)
    assert len(gateway.pool.prefills) == 2
    assert 'phasegate_decode_alone_total{reason="no_prefill"} 1.0' in page


async def test_abandoned_streams_give_their_slots_back() -> None:
    async with running_gateway(Script(hold_at=1), max_in_flight=1) as gateway:
        for _ in range(6):
            exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
            await exchange.message()
            exchange.hang_up()
            await asyncio.wait_for(exchange.task, 5)
        gateway.pool.script.release.set()
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)

    assert answer.status_code == 200


async def test_cancelled_server_task_cancels_the_engines() -> None:
    async with running_gateway(Script(hold_at=0)) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK, AUTH)
        await gateway.pool.decoding.wait()
        exchange.task.cancel()
        await asyncio.wait([exchange.task])

        assert gateway.pool.cancelled["decode"] == 1


async def test_request_beyond_the_cap_is_refused_with_retry_after() -> None:
    async with running_gateway(Script(hold_at=0), max_in_flight=1) as gateway:
        first = Exchange(gateway.app, RUN, ASK, AUTH)
        await gateway.pool.decoding.wait()
        refused = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        gateway.pool.script.release.set()
        await asyncio.wait_for(first.task, 5)

    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "capacity_exceeded")
    assert int(refused.headers["retry-after"]) > 0


async def test_request_past_its_deadline_ends_and_is_cancelled_in_the_engine() -> None:
    async with running_gateway(Script(hold_at=0), request_timeout_s=0.05) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        cancelled = gateway.pool.cancelled["decode"]

    assert (answer.status_code, answer.json()["errors"][0]["code"], cancelled) == (408, 3007, 1)


async def test_malformed_frame_disturbs_no_stream() -> None:
    async with running_gateway(Script(hold_at=1)) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        await exchange.message()
        await gateway.pool.send_raw(b"\xff not a frame")
        gateway.pool.script.release.set()
        await asyncio.wait_for(exchange.task, 5)
        bodies = b"".join([body async for body in _rest(exchange)])
        malformed = gateway.bus.malformed

    assert malformed == 1
    assert bodies.endswith(b"data: [DONE]\n\n")


async def test_summary_of_a_finished_request_tells_the_path_taken() -> None:
    async with running_gateway() as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH)
        summary = gateway.summaries.get(answer.headers["x-request-id"])

    assert summary
    assert (summary["prefill_replica"], summary["decode_replica"]) == ("p1", "d1")
    assert (summary["handoff"], summary["pages"], summary["wire_bytes"]) == ("shipped", 2, 64)
    assert (summary["status"], summary["output_tokens"]) == ("finished", 14)
    assert summary["ttft_s"] <= summary["seconds"]


async def _rest(exchange: Exchange) -> Any:
    while not exchange.drained():
        yield (await exchange.message()).get("body", b"")


def test_no_error_is_an_answer_with_status_200() -> None:
    assert all(kind.status >= 400 for kind in ApiError.__subclasses__())
