"""`phasegate down` while requests are in flight: each gets its answer, or is told that it will not."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.aborts import Client, await_idle
from tests.support.stack import Stack, cli, eventually, processes_of, running_stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(400)]

GRACE_S = 10.0
PROMPT = "Write a long story about a river. "


def body_of(answer: bytes) -> bytes:
    return answer.split(b"\r\n\r\n", 1)[1]


def refusal(stack: Stack) -> httpx.Response | None:
    """The answer to a new request, once it is a refusal."""
    try:
        answer = httpx.post(
            stack.run_url, json={"prompt": "Hi", "max_tokens": 1}, headers=stack.headers, timeout=5
        )
    except httpx.TransportError:
        return None
    return answer if answer.status_code != 200 else None


@pytest.fixture(scope="module")
def own_stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("leaving")
    config = {"limits": {"shutdown_grace_s": GRACE_S}}
    with running_stack(folder, profile="exact", config=config) as stack:
        yield stack


def decoding(stack: Stack) -> int:
    """Requests that the decode engine computes."""
    rows = stack.control("/status").json()["replicas"]
    return sum(row["running"] for row in rows if row["phase"] == "decode")


def test_a_killed_gateway_leaves_nothing_running_for_nobody(own_stack: Stack) -> None:
    stack = own_stack
    body = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 7000, "stream": True}
    clients = [Client(stack, body, label=f"orphan-{number}") for number in range(3)]
    eventually(lambda: decoding(stack), lambda found: found == 3, within_s=30)
    (gateway,) = stack.control("/status").json()["gateways"]

    os.kill(gateway["pid"], signal.SIGKILL)

    eventually(lambda: decoding(stack), lambda found: found == 0, within_s=20, what="end of the requests")
    for client in clients:
        client.leave("fin")
    await_idle(stack, None)
    hello = {"prompt": "Hi", "max_tokens": 1}
    eventually(
        lambda: httpx.post(stack.run_url, json=hello, headers=stack.headers, timeout=30).status_code,
        lambda status: status == 200,
        within_s=90,
        what="answer of a new gateway",
    )


def test_down_finishes_what_it_can_and_cuts_nothing_in_silence(own_stack: Stack) -> None:
    """Last in the file: afterwards nothing runs."""
    stack = own_stack
    with ThreadPoolExecutor(8) as pool:
        ask = {"prompt": PROMPT, "temperature": 1.0}
        short = Client(stack, {**ask, "max_tokens": 40, "stream": True}, label="short")
        streamed = Client(stack, {**ask, "max_tokens": 7000, "stream": True}, label="streamed")
        whole = Client(stack, {**ask, "max_tokens": 7000}, label="whole")
        answers = [pool.submit(client.answer) for client in (short, streamed, whole)]
        eventually(
            lambda: stack.control("/status").json(),
            lambda status: any(
                row["phase"] == "decode" and row["running"] >= 2 for row in status["replicas"]
            ),
            within_s=30,
        )

        began = time.monotonic()
        assert stack.control("/stop", "POST").status_code == 200  # what `phasegate down` asks for
        refused = eventually(lambda: refusal(stack), lambda found: found is not None, within_s=5)
        finished, cut, never = (answer.result(60) for answer in answers)
        ended = time.monotonic() - began
        assert cli("down", "--state", str(stack.state), timeout_s=120).returncode == 0  # waits for the end

        assert refused.status_code in (429, 503), refused.text
        assert int(refused.headers["retry-after"]) >= 1
        assert b"data: [DONE]" in finished
        assert b" 200 " in cut.splitlines()[0]
        assert b"[DONE]" not in cut
        events = [line for line in cut.splitlines() if line.startswith(b"data: ")]
        assert len(events) > 2
        assert json.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "shutting_down"
        assert b" 503 " in never.splitlines()[0]
        assert json.loads(body_of(never))["errors"][0]["code"] == 7013
        assert ended < GRACE_S + 10
        assert processes_of(stack.state) == []
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", httpx.URL(stack.base_url).port or 0), timeout=1)
