"""What the running system lets in, tells, and leaves behind."""

import ipaddress
import json
import socket
import stat
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.stack import Stack, cli, processes_of, running_stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

HELLO = {"prompt": "Hello", "max_tokens": 1}


def test_a_second_account_has_its_own_key_and_none_of_the_firsts(client: httpx.Client, stack: Stack) -> None:
    made = cli("key", "create", "--account", "second", "--state", str(stack.state))
    assert made.returncode == 0, made.stderr
    key = json.loads(made.stdout)["api_key"]
    theirs = {"authorization": f"Bearer {key}"}

    foreign = httpx.post(stack.run_url, json=HELLO, headers=theirs, timeout=60)
    own = httpx.post(
        stack.chat_url,
        json={"model": stack.model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]},
        headers=theirs,
        timeout=60,
    )

    assert (foreign.status_code, foreign.json()["errors"][0]["code"]) == (403, 10000)
    assert own.status_code == 200
    assert key not in foreign.text


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"temperature": 9}, 5006, "temperature"),
        ({"kv_transfer_params": {}}, 5006, "kv_transfer_params"),
        ({"prompt": "word " * 9000}, 5021, "prompt"),
        ({"prompt": "word " * 9000, "stream": True}, 5021, "prompt"),
    ],
)
def test_bad_input_is_refused_before_the_first_byte_and_named(
    client: httpx.Client, stack: Stack, change: dict, code: int, param: str
) -> None:
    answer = client.post(stack.run_url, json={**HELLO, **change})

    assert answer.headers["content-type"] == "application/json"
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (400, code)
    assert answer.json()["error"]["param"] == param


def test_an_encoded_model_path_reaches_the_same_model(client: httpx.Client, stack: Stack) -> None:
    url = stack.run_url.replace(stack.model, stack.model.replace("/", "%2F"))

    assert client.post(url, json=HELLO).status_code == 200


def test_every_answer_carries_one_request_id(client: httpx.Client, stack: Stack) -> None:
    named = client.post(stack.run_url, json=HELLO, headers={"x-request-id": "mine-1"})
    refused = client.post(stack.run_url, json={"promt": "x"})

    assert named.headers.get_list("x-request-id") == ["mine-1"]
    assert named.headers["cf-ai-req-id"] == "mine-1"
    assert refused.headers.get_list("x-request-id") == [refused.headers["cf-ai-req-id"]]


def test_status_names_both_phases_and_the_gateway(stack: Stack) -> None:
    status = stack.status()

    assert status["profile"] == {"name": "exact", "instead": None}
    assert {row["phase"] for row in status["replicas"]} == {"prefill", "decode"}
    assert all(row["format"] == "fp32" and psutil.pid_exists(row["pid"]) for row in status["replicas"])
    assert [set(row) for row in status["gateways"]] == [
        {"id", "pid", "in_flight", "places", "subscriptions", "contract", "drifted"}
    ]
    assert status["gateways"][0]["drifted"] == []
    assert {row["contract"] for row in status["replicas"]} == {status["gateways"][0]["contract"]}
    assert [row["id"] for row in status["replicas"]] == sorted(row["id"] for row in status["replicas"])


def test_a_second_instance_on_the_same_state_is_told_who_has_it(stack: Stack) -> None:
    again = cli("up", "--state", str(stack.state), "--port", "1", "--detach")

    assert again.returncode != 0
    pid = json.loads((stack.state / "runtime.json").read_text())["pid"]
    assert str(pid) in again.stdout + again.stderr


def test_the_state_folder_is_private_and_keys_are_in_no_process_list(stack: Stack) -> None:
    assert stat.S_IMODE(stack.state.stat().st_mode) == 0o700
    for name in ("local.json", "secrets.json", "gateway-secrets.json"):
        assert stat.S_IMODE((stack.state / name).stat().st_mode) == 0o600
    secrets = json.loads((stack.state / "secrets.json").read_text())
    hidden = [stack.api_key, *(value for value in secrets.values() if isinstance(value, str))]
    for process in processes_of(stack.state):
        words = " ".join(process.cmdline())
        assert not [secret for secret in hidden if secret in words]


def loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def test_no_process_gives_way_to_others_on_the_machine(stack: Stack) -> None:
    supervisor = json.loads((stack.state / "runtime.json").read_text())["pid"]
    own = psutil.Process(supervisor).nice()

    nicer = [process.name() for process in processes_of(stack.state) if process.nice() != own]

    assert nicer == []


def test_everything_listens_on_loopback_only(stack: Stack) -> None:
    """Engines, the token bus, control channels, Redis and Ray take no connection from outside."""
    open_to_all = []
    for process in processes_of(stack.state):
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN and not loopback(connection.laddr.ip):
                open_to_all.append((process.name(), connection.laddr.ip, connection.laddr.port))

    assert open_to_all == []


def test_start_fails_clearly_when_the_port_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = cli("up", "--state", str(tmp_path / "s"), "--port", str(port), "--detach")

    assert refused.returncode != 0
    assert f"port: {port}" in refused.stdout + refused.stderr
    assert processes_of(tmp_path / "s") == []


@pytest.mark.long
def test_down_leaves_no_process_and_no_address(tmp_path: Path, model_dir: Path) -> None:
    with running_stack(tmp_path, profile="exact", config={}) as stack:
        assert processes_of(stack.state)

    assert processes_of(stack.state) == []
    assert not (stack.state / "local.json").exists()
