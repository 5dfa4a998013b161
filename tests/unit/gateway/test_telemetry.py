"""One request as the gateway's spans tell it, through the real HTTP surface and bus."""

import asyncio
import json
import logging
from itertools import pairwise

import pytest

from gateway.metrics import Stage
from gateway.telemetry import Telemetry
from tests.support.asgi import Exchange
from tests.support.engine_pool import Script
from tests.support.gateways import AUTH, CHAT, KEY, MODEL, RUN, running_gateway
from tests.support.spans import SpanBook, parent_id, span_id, trace_id

TRACE, PARENT = "ab" * 16, "cd" * 8
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
SENTINEL = "xyzzy-plugh-42"
ASK = {"messages": [{"role": "user", "content": SENTINEL}]}
STAGES = [stage.value for stage in Stage]


@pytest.fixture
def book() -> SpanBook:
    return SpanBook()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_stages_follow_each_other_without_a_gap_under_the_clients_trace(
    book: SpanBook, stream: bool
) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        answer = await gateway.client.post(
            RUN, json=ASK | {"stream": stream}, headers=AUTH | SAMPLED | {"x-request-id": "mine"}
        )
        summary = gateway.summaries.get("mine")

    root = book["request"]
    stages = [book[name] for name in STAGES]
    assert answer.status_code == 200
    assert book.names == [*STAGES, "request"]
    assert (trace_id(root), parent_id(root)) == (TRACE, PARENT)
    assert {parent_id(stage) for stage in stages} == {span_id(root)}
    assert summary is not None
    assert (summary["trace_id"], summary["sampled"]) == (TRACE, True)
    for before, after in pairwise(stages):
        assert before.end_time <= after.start_time  # type: ignore[operator]
    assert root.start_time <= stages[0].start_time  # type: ignore[operator]
    assert stages[-1].end_time <= root.end_time  # type: ignore[operator]
    assert dict(root.attributes or {}) == {
        "phasegate.request_id": summary["request_id"],
        "phasegate.label": "mine",
        "phasegate.model": MODEL,
        "phasegate.stream": stream,
        "phasegate.prompt_tokens": summary["prompt_tokens"],
        "phasegate.cached_tokens": 16,
        "phasegate.output_tokens": 14,
        "phasegate.status": 200,
    }


async def test_both_engines_are_told_the_root_as_their_parent(book: SpanBook) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        await gateway.client.post(RUN, json=ASK, headers=AUTH | SAMPLED)

        expected = f"00-{TRACE}-{span_id(book['request'])}-01"
        assert gateway.pool.prefills[0].traceparent == expected
        assert gateway.pool.decodes[0].traceparent == expected


@pytest.mark.parametrize(
    "given",
    [
        "nonsense",
        f"00-{'0' * 32}-{PARENT}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01" + "x" * 10_000,
    ],
)
async def test_a_traceparent_that_is_not_one_is_ignored(book: SpanBook, given: str) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        answer = await gateway.client.post(RUN, json=ASK, headers=AUTH | {"traceparent": given})

    assert answer.status_code == 200
    assert parent_id(book["request"]) == ""
    assert trace_id(book["request"]) != TRACE


async def test_of_two_traceparents_neither_counts(book: SpanBook) -> None:
    two = [("traceparent", SAMPLED["traceparent"]), ("traceparent", f"00-{'ee' * 16}-{PARENT}-01")]
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        await gateway.client.post(RUN, json=ASK, headers=[*AUTH.items(), *two])

    assert parent_id(book["request"]) == ""


async def test_a_tracestate_goes_no_further(book: SpanBook) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        headers = AUTH | SAMPLED | {"tracestate": f"vendor={SENTINEL}"}
        await gateway.client.post(RUN, json=ASK, headers=headers)

    assert SENTINEL not in "".join(span.to_json() for span in book.spans)


async def test_a_request_that_its_client_does_not_sample_makes_no_span_and_keeps_its_trace() -> None:
    book = SpanBook()
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        await gateway.client.post(RUN, json=ASK, headers=AUTH | UNSAMPLED | {"x-request-id": "mine"})
        summary = gateway.summaries.get("mine")
        told = gateway.pool.decodes[0].traceparent

    assert book.spans == []
    assert (told[:35], told[-3:]) == (f"00-{TRACE}", "-00")
    assert summary is not None
    assert (summary["trace_id"], summary["sampled"]) == (TRACE, False)


async def test_at_ratio_zero_only_what_its_client_samples_is_traced() -> None:
    book = SpanBook(sample_ratio=0.0)
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        await gateway.client.post(RUN, json=ASK, headers=AUTH)
        assert book.spans == []
        await gateway.client.post(RUN, json=ASK, headers=AUTH | SAMPLED)

    assert trace_id(book["request"]) == TRACE


@pytest.mark.parametrize(
    ("body", "headers", "word", "stages"),
    [
        (ASK, {"authorization": f"Bearer {KEY}x"}, "invalid_api_key", ["admission"]),
        (ASK | {"temperature": SENTINEL}, AUTH, "invalid_request", ["admission"]),
        (
            {"prompt": SENTINEL * 40, "raw": True},
            AUTH,
            "context_length_exceeded",
            ["admission", "render"],
        ),
    ],
)
async def test_a_refused_request_ends_in_its_stage_with_the_errors_word(
    book: SpanBook, body: object, headers: dict[str, str], word: str, stages: list[str]
) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        answer = await gateway.client.post(RUN, json=body, headers=headers)

    assert answer.status_code >= 400
    assert book.names == [*stages, "request"]
    assert book["request"].status.description == word
    assert (book["request"].attributes or {})["error.type"] == word
    assert book[stages[-1]].status.description == word
    assert not any(span.events for span in book.spans)  # an exception's text may hold anything


async def test_a_client_that_leaves_a_stream_ends_the_trace_in_its_stage(book: SpanBook) -> None:
    script = Script(hold_at=1)
    async with running_gateway(script, telemetry=Telemetry(book.tracer)) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        await exchange.message()
        await exchange.message()
        exchange.hang_up()
        await asyncio.wait_for(exchange.task, 5)

    assert book["last_token"].status.description == "client_gone"
    assert book["request"].status.description == "client_gone"


@pytest.mark.parametrize("how", ["cancelled", "in its body"])
async def test_a_client_that_left_is_counted_as_gone_however_the_gateway_hears_of_it(
    book: SpanBook, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Serve cancels the request of a client that is gone; who leaves within a body is heard there."""
    telemetry = Telemetry(book.tracer)
    async with running_gateway(Script(hold_at=0), telemetry=telemetry) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK, AUTH, whole=how == "cancelled")
        if how == "cancelled":
            await gateway.pool.decoding.wait()
            exchange.task.cancel()
        else:
            exchange.hang_up()
        await asyncio.wait([exchange.task], timeout=5)
        page = telemetry.metrics.page(0).decode()

    stage = "first_token" if how == "cancelled" else "admission"
    assert 'phasegate_requests_total{outcome="client_gone"} 1.0' in page
    assert 'phasegate_requests_total{outcome="finished"} 0.0' in page
    assert 'phasegate_requests_total{outcome="failed"} 0.0' in page
    assert f'phasegate_aborts_total{{stage="{stage}"}} 1.0' in page
    assert "phasegate_request_seconds_count 0.0" in page
    assert book["request"].status.description == "client_gone"
    assert "crashed" not in caplog.text


async def test_after_a_stop_string_the_summary_tells_how_the_pages_came(book: SpanBook) -> None:
    """Decode's own account never comes: its call is cancelled."""
    script = Script(tells_first=True, hold_at=4)
    async with running_gateway(script, telemetry=Telemetry(book.tracer)) as gateway:
        headers = AUTH | {"x-request-id": "mine"}
        await gateway.client.post(CHAT, json=ASK | {"model": MODEL, "stop": [","]}, headers=headers)
        summary = gateway.summaries.get("mine")

    assert summary is not None
    assert summary["status"] == "finished"
    assert (summary["handoff"], summary["pages"], summary["wire_bytes"]) == ("shipped", 2, 64)


async def test_health_checks_are_not_traced(book: SpanBook) -> None:
    async with running_gateway(telemetry=Telemetry(book.tracer)) as gateway:
        await gateway.client.get("/healthz")

    assert book.spans == []


async def test_nothing_of_the_prompt_the_answer_or_the_key_is_in_a_span(book: SpanBook) -> None:
    script = Script(answer=f"about {SENTINEL}")
    async with running_gateway(script, telemetry=Telemetry(book.tracer)) as gateway:
        for body in (ASK, ASK | {"stream": True}, ASK | {"stop": [SENTINEL]}, {"prompt": 1, SENTINEL: 2}):
            await gateway.client.post(RUN, json=body, headers=AUTH)
            await gateway.client.post(CHAT, json=body | {"model": MODEL}, headers=AUTH)
        await gateway.client.post(f"{RUN}/{SENTINEL}?q={SENTINEL}", json=ASK, headers=AUTH)
        await gateway.client.post(
            RUN, json=ASK, headers=AUTH | {"x-request-id": f"bad {SENTINEL}", "user-agent": SENTINEL}
        )

    written = "".join(span.to_json() for span in book.spans)
    assert len(book.spans) > 40
    assert SENTINEL not in written
    assert KEY not in written


async def test_log_lines_of_a_request_carry_its_ids(book: SpanBook) -> None:
    from kv_transfer.api import FieldFormatter

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.setFormatter(FieldFormatter())
    logger = logging.getLogger("gateway")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        async with running_gateway(Script(lose={1}), telemetry=Telemetry(book.tracer)) as gateway:
            await gateway.client.post(RUN, json=ASK, headers=AUTH | SAMPLED | {"x-request-id": "mine"})
            summary = gateway.summaries.get("mine")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)

    assert summary is not None
    mine = [line for line in lines if summary["request_id"] in line]
    assert any("request.refetch" in line for line in mine)
    assert any("request.done" in line for line in mine)
    assert all(line.endswith(f"trace_id={TRACE}") for line in mine)
    assert json.loads(mine[-1].split("request.done ")[1].split(" trace_id=")[0])["output_tokens"] == 14
