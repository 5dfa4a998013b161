"""What nobody may find: prompts, answers, keys and passwords, wherever the system writes.

By design a key stands in `local.json` and `owner.json` (the owner's own), and the system's passwords in the
files named in `MAY_HOLD`; all of them are private to their owner. Nothing else is an exception.

The last file of its folder: it kills an engine of the system that all of them share.
"""

import json
import os
import re
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import redis

from tests.e2e.test_answers import address_of, events_of, request_bytes
from tests.support.stack import ROOT, Stack, busy, cli, eventually, processes_of

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

PROMPT = f"quokka{secrets.token_hex(8)}zebra"
MAY_HOLD: Mapping[str, frozenset[str]] = {
    "owner's key": frozenset({"local.json", "owner.json"}),
    "redis password": frozenset({"secrets.json", "gateway-secrets.json", "redis/redis.conf"}),
    "pepper": frozenset({"secrets.json", "gateway-secrets.json"}),
    "cluster token": frozenset({"ray-token"}),
    "internal token": frozenset({"internal-token"}),
}
"""By secret: the files of the state folder that hold it by design."""


@pytest.fixture(scope="module")
def hidden(stack: Stack, model_dir: Path) -> dict[str, str]:
    """What is looked for, after it went through everything that a request can meet, a crash included."""
    from tokenizers import Tokenizer

    made = cli("key", "create", "--account", "hidden", "--state", str(stack.state))
    key = json.loads(made.stdout)["api_key"]
    answer = exercise(stack, key)
    crash(stack)
    own = json.loads((stack.state / "secrets.json").read_text())
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(f"Repeat: {PROMPT}").ids
    return {
        "prompt": PROMPT,
        "prompt as token ids": ", ".join(map(str, ids[2:10])),
        "answer": answer,
        "key": key,
        "key that is none": UNKNOWN_KEY,
        "owner's key": stack.api_key,
        "redis password": own["redis_password"],
        "pepper": own["pepper"],
        "cluster token": (stack.state / "ray-token").read_text().strip(),
        "internal token": (stack.state / "internal-token").read_text().strip(),
    }


LONG = {
    "prompt": f"Write a long story about {PROMPT}. " * 10,
    "max_tokens": 2000,
    "temperature": 0.9,
}
"""Its answer lasts long enough to be left, or to be killed."""
UNKNOWN_KEY = f"pg_{secrets.token_urlsafe(32)}"


def exercise(stack: Stack, key: str) -> str:
    """Answers, refusals and disconnects; returns a text that was answered."""
    hello = {"prompt": f"Repeat: {PROMPT} {PROMPT}", "raw": True, "max_tokens": 16, "temperature": 0}
    chat = {"model": stack.model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    with httpx.Client(headers=stack.headers, timeout=120) as client:
        answer: str = client.post(stack.run_url, json=hello).json()["result"]["response"]
        with client.stream("POST", stack.run_url, json={**hello, "stream": True}) as streamed:
            assert events_of(streamed)[-1] == "[DONE]"
        refusals: list[tuple[str, dict[str, Any]]] = [
            (stack.run_url, {**hello, "temperature": PROMPT}),
            (stack.run_url, {**hello, PROMPT: 1}),
            (stack.run_url, {**hello, "prompt": f"{PROMPT} " * 3000}),
            (stack.run_url.replace(stack.model, PROMPT), hello),
            (stack.chat_url, {**chat, "model": PROMPT}),
            (stack.chat_url, {**chat, "messages": PROMPT}),
        ]
        for url, body in refusals:
            assert 400 <= client.post(url, json=body).status_code < 500
        assert client.post(stack.run_url, content=f'{{"prompt": "{PROMPT}').status_code == 400
        assert client.get(f"{stack.base_url}/{PROMPT}?api_key={key}").status_code == 404
    for wrong in (UNKNOWN_KEY, f"Bearer {UNKNOWN_KEY}", PROMPT):
        refused = httpx.post(
            stack.chat_url, json=chat, headers={"authorization": f"Bearer {wrong}"}, timeout=60
        )
        assert refused.status_code == 401
    theirs = httpx.post(stack.chat_url, json=chat, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert theirs.status_code == 200
    for stream in (True, False):
        with socket.create_connection(address_of(stack.base_url)) as connection:
            connection.sendall(request_bytes(stack, {**LONG, "stream": stream}))
            eventually(lambda: busy(stack.control("/status").json()), bool)
    eventually(stack.idle, bool)
    assert len(answer.strip()) > 12, answer  # long enough to be looked for
    return answer.strip()


def crash(stack: Stack) -> None:
    """The decode engine is killed in the middle of an answer; returns when another one answers."""
    decode = next(row["pid"] for row in stack.status()["replicas"] if row["phase"] == "decode")
    engine = next(
        process
        for process in psutil.Process(decode).children(recursive=True)
        if "EngineCore" in " ".join([process.name(), *process.cmdline()])
    )
    with (
        httpx.Client(headers=stack.headers, timeout=60) as client,
        client.stream("POST", stack.run_url, json={**LONG, "stream": True}) as answer,
    ):
        lines = (line for line in answer.iter_lines() if line)
        assert "response" in next(lines)
        engine.send_signal(signal.SIGKILL)
        assert "error" in json.loads([*lines][-1].removeprefix("data: "))

    def answers() -> int:
        hello = {"prompt": PROMPT, "max_tokens": 1}
        return httpx.post(stack.run_url, json=hello, headers=stack.headers, timeout=60).status_code

    eventually(answers, lambda status: status == 200, within_s=150)
    eventually(stack.idle, bool, within_s=30)


def written(stack: Stack) -> Iterator[tuple[str, bytes]]:
    """Everything that lies in files: of the state folder by relative name, of the scratch folder by path."""
    for folder in (stack.state, scratch(stack)):
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                inside = path.is_relative_to(stack.state)
                yield str(path.relative_to(stack.state) if inside else path), path.read_bytes()


def scratch(stack: Stack) -> Path:
    return Path(json.loads((stack.state / "runtime.json").read_text())["scratch"])


def test_files_hold_no_secret_but_those_that_are_for_it(stack: Stack, hidden: dict[str, str]) -> None:
    time.sleep(1)  # what is still being written
    found, seen = [], 0
    for name, content in written(stack):
        seen += 1
        found += [
            f"{what} in {name}"
            for what, text in hidden.items()
            if text.encode() in content and name not in MAY_HOLD.get(what, ())
        ]

    assert found == []
    assert seen > 20  # the state folder, the logs, Ray's session


def test_what_is_for_a_secret_holds_it(stack: Stack, hidden: dict[str, str]) -> None:
    """So that the search is known to find what is there."""
    for what, names in MAY_HOLD.items():
        for name in names:
            assert hidden[what] in (stack.state / name).read_text(), f"{what} in {name}"


def test_no_process_has_a_secret_in_its_arguments_or_environment(
    stack: Stack, hidden: dict[str, str]
) -> None:
    processes = processes_of(stack.state)
    found = [
        f"{what} in {process.name()}"
        for process in processes
        for what, text in hidden.items()
        if text in " ".join([*process.cmdline(), *process.environ().values()])
    ]

    assert found == []
    assert len(processes) >= 8


def test_redis_holds_no_key_and_no_text(stack: Stack, hidden: dict[str, str]) -> None:
    url = json.loads((stack.state / "gateway-secrets.json").read_text())["state_url"]
    with redis.Redis.from_url(url) as client:
        names = list(client.scan_iter())
        content = b"\n".join([*names, *(_value(client, name) for name in names)])

    assert len(names) > 4
    assert [what for what, text in hidden.items() if text.encode() in content] == []


def _value(client: "redis.Redis[bytes]", name: bytes) -> bytes:
    kind = client.type(name)
    if kind == b"string":
        return client.get(name) or b""
    if kind == b"set":
        return b"\n".join(client.smembers(name))
    raise AssertionError(f"{name!r} is a {kind!r}: say how it is read")


def test_metrics_and_status_hold_no_secret(stack: Stack, hidden: dict[str, str]) -> None:
    told = stack.internal("/metrics").text + stack.control("/status").text

    assert "# HELP" in told
    assert [what for what, text in hidden.items() if text in told] == []


READ_CONTROL_SERVICE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
for space in (None, b"serve", b"phasegate.engines", b"fun", b"session", b"cluster", b"dashboard"):
    for key in client.internal_kv_keys(b"", space):
        sys.stdout.buffer.write(key + b"\\n" + (client.internal_kv_get(key, space) or b"") + b"\\n")
"""


def test_serves_configuration_holds_no_secret(stack: Stack, hidden: dict[str, str]) -> None:
    """It lies in Ray's control service, for whoever has the cluster's token."""
    raylet = next(process for process in processes_of(stack.state) if process.name() == "raylet")
    address = next(
        word.partition("=")[2] for word in raylet.cmdline() if re.match(r"--gcs[-_]address=", word)
    )
    ran = subprocess.run(
        [sys.executable, "-c", READ_CONTROL_SERVICE, address],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(stack.state / "ray-token"),
        },
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert b"GatewayDeployment" in ran.stdout  # the configuration is in it
    assert [what for what, text in hidden.items() if text.encode() in ran.stdout] == []


def test_everything_in_the_state_folder_is_its_owners_only(stack: Stack) -> None:
    open_to_others = [
        f"{path.relative_to(stack.state)} {stat.S_IMODE(path.stat().st_mode):o}"
        for path in (stack.state, *stack.state.rglob("*"))
        if not path.is_symlink() and path.stat().st_mode & 0o077
    ]

    assert open_to_others == []
    assert stat.S_IMODE(stack.state.stat().st_mode) == 0o700
    assert stat.S_IMODE(scratch(stack).stat().st_mode) == 0o700
