"""What a gateway counts, through the real HTTP surface and bus."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics
from gateway.telemetry import Telemetry
from tests.support.asgi import Exchange
from tests.support.engine_pool import Script
from tests.support.gateways import AUTH, KEY, RUN, running_gateway
from workers.api import FaultKind

SENTINEL = "xyzzy-plugh-42"
ASK = {"messages": [{"role": "user", "content": SENTINEL}]}


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(metrics.page(0).decode()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(f"no {name} {labels}")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_finished_request_is_measured_from_end_to_end(stream: bool) -> None:
    telemetry = Telemetry()
    metrics = telemetry.metrics
    script = Script(hold_at=1)
    async with running_gateway(script, telemetry=telemetry) as gateway:
        asking = asyncio.create_task(gateway.client.post(RUN, json=ASK | {"stream": stream}, headers=AUTH))
        while value(metrics, "phasegate_time_to_first_token_seconds_count") < 1:  # noqa: ASYNC110 - counters do not call
            await asyncio.sleep(0.001)
        script.release.set()
        await asking

    assert value(metrics, "phasegate_requests_total", outcome="finished") == 1
    for name in ("request", "time_to_first_token", "time_per_output_token", "queue"):
        assert value(metrics, f"phasegate_{name}_seconds_count") == 1
    # 14 tokens, three a frame: the first frame begins, the other four follow, some of them together.
    assert 1 <= value(metrics, "phasegate_inter_token_seconds_count") <= 4
    assert value(metrics, "phasegate_tokens_total", kind="prompt") == len(SENTINEL) + 6
    assert value(metrics, "phasegate_tokens_total", kind="cached") == 16
    assert value(metrics, "phasegate_tokens_total", kind="output") == 14
    assert value(metrics, "phasegate_request_seconds_sum") >= value(
        metrics, "phasegate_time_to_first_token_seconds_sum"
    )


async def test_a_refused_request_counts_as_its_error_and_measures_nothing() -> None:
    telemetry = Telemetry()
    async with running_gateway(telemetry=telemetry) as gateway:
        await gateway.client.post(RUN, json=ASK | {"temperature": 9}, headers=AUTH)
        await gateway.client.post(RUN, json=ASK, headers={"authorization": f"Bearer {KEY}x"})
        await gateway.client.post(f"{RUN}x", json=ASK, headers=AUTH)
        await gateway.client.post("/nowhere", json=ASK, headers=AUTH)

    metrics = telemetry.metrics
    assert value(metrics, "phasegate_requests_total", outcome="failed") == 4
    for code in ("invalid_request", "invalid_api_key", "no_such_model", "not_found"):
        assert value(metrics, "phasegate_errors_total", code=code) == 1
    assert value(metrics, "phasegate_request_seconds_count") == 0
    assert value(metrics, "phasegate_tokens_total", kind="prompt") == 0


async def test_an_error_in_mid_stream_counts_by_its_word_and_the_engines_fault_by_its_kind() -> None:
    telemetry = Telemetry()
    script = Script(hold_at=1, fault=FaultKind.ENGINE_DEAD)
    async with running_gateway(script, telemetry=telemetry) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        await exchange.message()
        script.release.set()
        await asyncio.wait_for(exchange.task, 5)

    metrics = telemetry.metrics
    assert value(metrics, "phasegate_errors_total", code="engine_lost") == 1
    assert value(metrics, "phasegate_engine_answers_failed_total", phase="decode", fault="engine_dead") == 1
    assert value(metrics, "phasegate_time_to_first_token_seconds_count") == 1
    assert value(metrics, "phasegate_request_seconds_count") == 0


@pytest.mark.parametrize(
    ("script", "frames", "stage"),
    [(Script(hold_at=0), 0, "first_token"), (Script(hold_at=1), 2, "last_token")],
)
async def test_a_client_that_leaves_counts_in_its_stage_and_as_no_error(
    script: Script, frames: int, stage: str
) -> None:
    telemetry = Telemetry()
    async with running_gateway(script, telemetry=telemetry) as gateway:
        exchange = Exchange(gateway.app, RUN, ASK | {"stream": True}, AUTH)
        await gateway.pool.decoding.wait()
        for _ in range(frames):
            await exchange.message()
        exchange.hang_up()
        await asyncio.wait_for(exchange.task, 5)

    metrics = telemetry.metrics
    assert value(metrics, "phasegate_aborts_total", stage=stage) == 1
    assert value(metrics, "phasegate_requests_total", outcome="client_gone") == 1
    assert value(metrics, "phasegate_requests_total", outcome="failed") == 0


async def test_a_gap_on_the_bus_counts_and_so_does_what_is_no_frame() -> None:
    telemetry = Telemetry()
    async with running_gateway(Script(lose={1}), telemetry=telemetry) as gateway:
        telemetry.metrics.watch_bus(gateway.bus)
        await gateway.pool.send_raw(b"\xc1")
        await gateway.client.post(RUN, json=ASK, headers=AUTH)

        assert value(telemetry.metrics, "phasegate_bus_refetches_total") == 1
        assert value(telemetry.metrics, "phasegate_bus_frames_malformed_total") == 1


async def test_nothing_of_the_prompt_the_answer_or_the_key_is_on_the_page() -> None:
    telemetry = Telemetry()
    async with running_gateway(Script(answer=SENTINEL), telemetry=telemetry) as gateway:
        for path in (RUN, f"{RUN}/{SENTINEL}", f"/{SENTINEL}"):
            for body in (ASK, ASK | {"stream": True}, ASK | {SENTINEL: 1}):
                headers = AUTH | {"x-request-id": SENTINEL}
                await gateway.client.post(path, json=body, headers=headers)

    page = telemetry.metrics.page(0).decode()
    assert value(telemetry.metrics, "phasegate_requests_total", outcome="finished") == 2
    assert SENTINEL not in page
    assert KEY not in page
