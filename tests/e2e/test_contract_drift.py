"""A model folder changes under a running system: who is started anew with it gets no requests."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.stack import ROOT, Stack, cli, eventually, running_stack
from workers.profile.fingerprint import contract_of
from workers.profile.schema import parse_profile

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

RESTART_S = 120.0


@pytest.fixture
def folder(tmp_path: Path, model_dir: Path) -> Path:
    """A model that the test may change. The engines are scripted: they load no weights."""
    own = tmp_path / "model"
    own.mkdir()
    for file in model_dir.iterdir():
        if file.suffix == ".safetensors":
            (own / file.name).symlink_to(file)
        else:
            shutil.copy(file, own)
    return own


@pytest.fixture
def profile(tmp_path: Path, folder: Path) -> Path:
    raw = yaml.safe_load((ROOT / "deploy/models/scripted.yaml").read_text())
    path = tmp_path / "drifting.yaml"
    path.write_text(yaml.safe_dump(raw | {"name": "drifting", "weights": {"path": str(folder)}}))
    return path


@pytest.fixture
def stack(tmp_path: Path, profile: Path) -> Iterator[Stack]:
    with running_stack(tmp_path, profile=str(profile), config={}) as stack:
        yield stack


def ask(stack: Stack, *, stream: bool = False) -> httpx.Response:
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Tell me of the sea, and of ships."}],
        "max_tokens": 4,
        "stream": stream,
    }
    return httpx.post(stack.chat_url, json=body, headers=stack.headers, timeout=60)


def restart(stack: Stack, phase: str) -> None:
    """Serve has a new replica of the phase when this returns, and every gateway has looked at it."""
    (old,) = [row for row in stack.status()["replicas"] if row["phase"] == phase]
    os.kill(old["pid"], signal.SIGKILL)
    eventually(
        lambda: [row["id"] for row in stack.status()["replicas"] if row["phase"] == phase],
        lambda ids: len(ids) == 1 and ids != [old["id"]],
        within_s=RESTART_S,
        what="new replica",
    )


def drifted(stack: Stack) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = stack.status()["gateways"][0]["drifted"]
    return found


def test_a_replica_that_comes_back_with_another_template_gets_no_requests_until_it_is_as_before(
    stack: Stack, folder: Path, profile: Path
) -> None:
    read = parse_profile(yaml.safe_load(profile.read_text()), source="test")
    before = contract_of(read, folder)
    whole, streamed = ask(stack), ask(stack, stream=True)
    assert (whole.status_code, streamed.status_code) == (200, 200), whole.text + streamed.text
    assert whole.json()["system_fingerprint"] == before.short
    assert streamed.text.count(f'"system_fingerprint":"{before.short}"') == streamed.text.count('"id":')
    assert drifted(stack) == []

    template = folder / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("helpful", "helpless"))
    restart(stack, "decode")
    (row,) = eventually(lambda: drifted(stack), bool, within_s=RESTART_S, what="drift")

    after = contract_of(read, folder)
    apart = before.disagreement(after, ours="the gateway", theirs=f"decode replica {row['id']}")
    assert (row["phase"], row["contract"], row["why"]) == ("decode", after.short, apart)
    assert "differ in chat template: characters 368 against 369, sha256 " in apart
    refused = ask(stack)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engines_unavailable")
    told = cli("status", "--state", str(stack.state)).stdout
    assert f"{row['id']} gets no requests: {apart}" in told
    metrics = stack.internal("/metrics").text
    (line,) = [
        m for m in metrics.splitlines() if m.startswith("phasegate_drifted_replicas") and "decode" in m
    ]
    assert line.endswith(" 1.0")
    logs = "".join(file.read_text() for file in (stack.state / "logs").glob("gateway-*.log"))
    assert f"engine.drifted replica={row['id']} phase=decode: {apart}" in logs

    template.write_text(text)
    restart(stack, "decode")
    eventually(
        lambda: ask(stack).status_code, lambda status: status == 200, within_s=RESTART_S, what="answer"
    )
    assert drifted(stack) == []
    assert ask(stack).json()["system_fingerprint"] == before.short
