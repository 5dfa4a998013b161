"""What clients see of contracts: an answer from the right engines or an error, and a fingerprint."""

from pathlib import Path

import pytest

from gateway.telemetry import Telemetry
from kv_transfer.api import Contract
from tests.support.engine_pool import Script
from tests.support.gateways import ASK, AUTH, CHAT, CHAT_ASK, RUN, events, running_gateway
from tests.support.model_folders import DIFFERENCES, contracts
from workers.api import FaultKind

KINDS = pytest.mark.parametrize("kind", DIFFERENCES)


@KINDS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_decode_replica_of_another_contract_never_serves_a_request(
    tmp_path: Path, kind: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own, other = contracts(tmp_path, DIFFERENCES[kind])
    telemetry = Telemetry()
    async with running_gateway(
        contract=own, contracts={"p1": own, "d1": other}, telemetry=telemetry
    ) as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"stream": stream}, headers=AUTH)
        ready = await gateway.client.get("/readyz")
        page = telemetry.metrics.page(0).decode()

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engines_unavailable")
    assert answer.headers["retry-after"] == "1"
    assert ready.status_code == 503
    assert (gateway.pool.prefills, gateway.pool.decodes) == ([], [])
    assert f"the gateway and decode replica d1 differ in {DIFFERENCES[kind].named}" in caplog.text
    assert 'phasegate_drifted_replicas{phase="decode"} 1.0' in page
    assert 'phasegate_drifted_replicas{phase="prefill"} 0.0' in page


@KINDS
async def test_a_prefill_replica_of_another_contract_computes_no_prompt(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decode computes it: an answer from one engine of the right contract."""
    own, other = contracts(tmp_path, DIFFERENCES[kind])
    telemetry = Telemetry()
    async with running_gateway(
        contract=own, contracts={"p1": other, "d1": own}, telemetry=telemetry
    ) as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK, headers=AUTH)
        (decode,) = gateway.pool.decodes
        page = telemetry.metrics.page(0).decode()

    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world."
    assert gateway.pool.prefills == []
    assert (decode.transfer_id, decode.prefill_engine) == (None, None)
    assert f"the gateway and prefill replica p1 differ in {DIFFERENCES[kind].named}" in caplog.text
    assert 'phasegate_drifted_replicas{phase="prefill"} 1.0' in page
    assert 'phasegate_decode_alone_total{reason="no_prefill"} 1.0' in page


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_engines_that_find_out_by_themselves_end_the_request_in_an_error(stream: bool) -> None:
    async with running_gateway(Script(fault=FaultKind.CONTRACT_MISMATCH)) as gateway:
        answer = await gateway.client.post(CHAT, json=CHAT_ASK | {"stream": stream}, headers=AUTH)

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "contract_mismatch")
    assert answer.json()["errors"][0]["code"] == 5011
    assert len(gateway.pool.decodes) == 1


async def fingerprints(contract: Contract) -> set[str]:
    """Of a whole answer and of every event of a stream."""
    async with running_gateway(contract=contract, contracts={"p1": contract, "d1": contract}) as gateway:
        whole = await gateway.client.post(CHAT, json=CHAT_ASK, headers=AUTH)
        ask = CHAT_ASK | {"stream": True, "stream_options": {"include_usage": True}}
        streamed = await gateway.client.post(CHAT, json=ask, headers=AUTH)
        native = await gateway.client.post(RUN, json=ASK, headers=AUTH)
    *chunks, done = events(streamed)
    assert done == "[DONE]"
    assert "system_fingerprint" not in native.text
    found = [whole.json()["system_fingerprint"], *(chunk["system_fingerprint"] for chunk in chunks)]
    assert len(found) > 4
    return set(found)


@KINDS
async def test_the_fingerprint_is_the_contracts_and_changes_with_it(tmp_path: Path, kind: str) -> None:
    one, other = contracts(tmp_path, DIFFERENCES[kind])

    assert await fingerprints(one) == {one.short}
    assert await fingerprints(other) == {other.short}
    assert one.short != other.short
