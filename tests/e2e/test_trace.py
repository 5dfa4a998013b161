"""One request from outside: its trace over all processes, its metrics, and what must be in neither."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stack import Stack, cli, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

TRACE, CLIENT_SPAN = "c0ffee" + "0" * 25 + "1", "beef" * 4
STAGES = ["admission", "render", "route", "first_token", "last_token"]
SENTINEL = "zanzibar-quokka-9134"
SLACK_MS = 2.0
"""Clocks of one machine are one clock; what is read in another order differs by scheduling only."""


def walk(span: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield span
    for child in span["children"]:
        yield from walk(child)


def within(child: dict[str, Any], parent: dict[str, Any]) -> bool:
    starts_in = child["start_ms"] >= parent["start_ms"] - SLACK_MS
    return starts_in and end(child) <= end(parent) + SLACK_MS


def end(span: dict[str, Any]) -> float:
    return float(span["start_ms"] + span["duration_ms"])


@pytest.fixture(scope="module")
def trace(stack: Stack) -> dict[str, Any]:
    """Of a streamed request whose client sent a `traceparent`, with several pages that nobody has cached."""
    body = {
        "prompt": f"Repeat after me, {SENTINEL}: " + " ".join(map(str, range(300, 420))),
        "max_tokens": 12,
        "temperature": 0,
        "stream": True,
    }
    headers = {
        **stack.headers,
        "traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01",
        "x-request-id": "traced-1",
    }
    answer = httpx.post(stack.run_url, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    return stack_trace(stack, "traced-1")


def stack_trace(stack: Stack, name: str) -> dict[str, Any]:
    told = cli("trace", name, "--json", "--state", str(stack.state))
    assert told.returncode == 0, told.stderr
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def test_the_trace_is_the_clients_and_spans_every_process(stack: Stack, trace: dict[str, Any]) -> None:
    spans = {span["name"]: span for span in walk(trace)}
    pids = {row["phase"]: row["pid"] for row in stack.status()["replicas"]}
    pids["gateway"] = stack.status()["gateways"][0]["pid"]

    assert {span["trace_id"] for span in spans.values()} == {TRACE}
    assert trace["parent_id"] == CLIENT_SPAN
    assert set(spans) == {"request", *STAGES, "prefill", "decode", "transfer"}
    assert len(list(walk(trace))) == len(spans)
    for name in (*STAGES, "prefill", "decode"):
        assert spans[name]["parent_id"] == trace["span_id"], name
    assert spans["transfer"]["parent_id"] == spans["decode"]["span_id"]
    assert {name: spans[name]["process"] for name in spans} == {
        **dict.fromkeys(("request", *STAGES), "gateway"),
        "prefill": "prefill",
        "decode": "decode",
        "transfer": "decode",
    }
    assert all(span["pid"] == pids[span["process"]] for span in spans.values())
    assert len(set(pids.values())) == 3
    assert [event["name"] for event in spans["decode"]["events"]] == ["first_token", "last_token"]


def test_durations_add_up(trace: dict[str, Any]) -> None:
    spans = {span["name"]: span for span in walk(trace)}
    stages = [spans[name] for name in STAGES]

    for parent in walk(trace):
        for child in parent["children"]:
            assert within(child, parent), (child["name"], parent["name"])
    for before, after in pairwise(stages):
        assert end(before) <= after["start_ms"] + SLACK_MS
    # What lies between the stages, and after the last of them, is little against the whole.
    covered = sum(stage["duration_ms"] for stage in stages)
    assert 0.9 * trace["duration_ms"] <= covered <= trace["duration_ms"]
    # Decode's first token comes after its pages and before the gateway's.
    first = next(event["at_ms"] for event in spans["decode"]["events"] if event["name"] == "first_token")
    assert end(spans["transfer"]) <= first + SLACK_MS
    assert first <= end(spans["first_token"]) + SLACK_MS
    assert spans["prefill"]["start_ms"] >= end(spans["route"]) - SLACK_MS


def test_spans_tell_what_was_done(stack: Stack, trace: dict[str, Any]) -> None:
    spans = {span["name"]: span["attributes"] for span in walk(trace)}
    replicas = {row["phase"]: row["id"] for row in stack.status()["replicas"]}
    summary = stack.internal("/debug/requests/traced-1").json()

    assert spans["request"]["request_id"] == summary["request_id"]
    assert (spans["request"]["label"], spans["request"]["output_tokens"]) == ("traced-1", 12)
    assert (spans["route"]["prefill_replica"], spans["route"]["decode_replica"]) == (
        replicas["prefill"],
        replicas["decode"],
    )
    assert (spans["transfer"]["outcome"], spans["transfer"]["pages"], spans["transfer"]["wire_bytes"]) == (
        "shipped",
        summary["pages"],
        summary["wire_bytes"],
    )
    assert summary["trace_id"] == TRACE


def test_the_tree_is_found_by_every_name_of_the_request(stack: Stack, trace: dict[str, Any]) -> None:
    request_id = trace["attributes"]["request_id"]

    told = cli("trace", request_id, "--state", str(stack.state))
    assert told.returncode == 0, told.stderr
    assert [name for name in ("transfer", "prefill", "last_token") if name not in told.stdout] == []
    assert stack.internal(f"/debug/traces/{TRACE}").json() == trace
    unknown = cli("trace", "nobody-asked-this", "--state", str(stack.state))
    assert unknown.returncode == 1
    assert "no trace of 'nobody-asked-this'" in unknown.stderr


def test_a_request_that_a_stop_string_ends_still_tells_how_its_pages_came(stack: Stack) -> None:
    """Its decode call is cancelled, and never returns a result."""
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": f"{SENTINEL} What is the capital of France?"}],
        "stop": " ",
        "temperature": 0,
        "max_tokens": 50,
    }
    headers = {**stack.headers, "x-request-id": "stopped-1"}
    answer = httpx.post(stack.chat_url, json=body, headers=headers, timeout=60)
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    summary = stack.summary(answer)
    spans = {span["name"]: span for span in walk(stack_trace(stack, "stopped-1"))}

    assert (summary["handoff"], summary["pages"] > 0) == ("shipped", True)
    assert spans["transfer"]["attributes"]["pages"] == summary["pages"]
    assert spans["decode"]["attributes"]["cancelled"] is True
    assert spans["decode"]["attributes"]["queued_ms"] >= spans["transfer"]["duration_ms"]
    assert spans["request"]["error"] is None


def test_a_request_that_its_client_does_not_sample_is_told_as_such(stack: Stack) -> None:
    headers = {**stack.headers, "traceparent": f"00-{'d' * 32}-{CLIENT_SPAN}-00", "x-request-id": "dark-1"}
    answer = httpx.post(stack.run_url, json={"prompt": "Hello", "max_tokens": 1}, headers=headers, timeout=60)
    assert answer.status_code == 200

    told = cli("trace", "dark-1", "--state", str(stack.state))
    assert told.returncode == 1
    assert "was not sampled" in told.stderr


def test_metrics_of_all_processes_are_on_one_page_behind_the_token(stack: Stack) -> None:
    headers = {**stack.headers, "x-request-id": "counted-1"}
    body = {"prompt": f"{SENTINEL} " * 20, "max_tokens": 3, "temperature": 0}
    before = samples(stack)
    assert httpx.post(stack.run_url, json=body, headers=headers, timeout=60).status_code == 200
    after = eventually(
        lambda: samples(stack),
        lambda now: now["phasegate_requests_total"] > before["phasegate_requests_total"],
    )

    assert stack.internal("/metrics", token="wrong").status_code == 401
    assert stack.internal("/healthz", token="wrong").status_code == 200
    assert after["phasegate_replica_up"] == 3
    for name in ("tokens_total", "transfers_total", "transfer_bytes_total", "engine_call_seconds_count"):
        assert after[f"phasegate_{name}"] > before[f"phasegate_{name}"], name
    assert after["phasegate_cache_pages_free"] == after["phasegate_cache_pages"]


def samples(stack: Stack) -> dict[str, float]:
    """By name, summed over all processes and labels."""
    answer = stack.internal("/metrics")
    assert answer.status_code == 200, answer.text
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_nothing_of_a_prompt_or_a_key_is_in_traces_metrics_or_logs(
    stack: Stack, trace: dict[str, Any]
) -> None:
    """Prompts with the sentinel were sent by the tests before this one."""
    files = [path for path in (stack.state / "logs").rglob("*") if path.is_file()]
    written = [(path, path.read_text(errors="replace")) for path in files]
    written.append((stack.state / "metrics", stack.internal("/metrics").text))
    secrets = [SENTINEL, stack.api_key, (stack.state / "internal-token").read_text()]

    for kind in ("trace-decode-", "engine-decode-", "engine-prefill-", "gateway-"):
        assert any(path.name.startswith(kind) for path, _ in written), kind
    assert [path for path, text in written for secret in secrets if secret in text] == []


def test_log_lines_of_a_request_carry_its_ids(stack: Stack, trace: dict[str, Any]) -> None:
    (log,) = (stack.state / "logs").glob("gateway-*.log")
    lines = [line for line in log.read_text().splitlines() if trace["attributes"]["request_id"] in line]

    assert lines
    assert all(f"trace_id={TRACE}" in line for line in lines)
