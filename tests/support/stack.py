"""The whole system as a user starts it: `phasegate up --detach` in a folder of its own."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cli(*words: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@dataclass(frozen=True)
class Stack:
    state: Path
    base_url: str
    account_id: str
    api_key: str
    model: str

    @property
    def run_url(self) -> str:
        return f"{self.base_url}/client/v4/accounts/{self.account_id}/ai/run/{self.model}"

    @property
    def chat_url(self) -> str:
        return f"{self.base_url}/v1/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    def status(self) -> dict[str, Any]:
        done = cli("status", "--state", str(self.state), "--json")
        assert done.returncode == 0, done.stderr
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def control(self, path: str, method: str = "GET") -> httpx.Response:
        """A question to the supervisor."""
        socket_path = json.loads((self.state / "runtime.json").read_text())["control_socket"]
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket_path)) as client:
            return client.request(method, f"http://supervisor{path}", timeout=20)

    def internal(self, path: str, *, token: str | None = None) -> httpx.Response:
        """A question on the internal port, with the state folder's token unless another is given."""
        config = yaml.safe_load((self.state.parent / "phasegate.yaml").read_text())
        known = (self.state / "internal-token").read_text()
        return httpx.get(
            f"http://127.0.0.1:{config['internal_port']}{path}",
            headers={"authorization": f"Bearer {known if token is None else token}"},
            timeout=20,
        )

    def summary(self, answer: httpx.Response) -> dict[str, Any]:
        """What the gateway remembers of the request behind this answer."""
        name = answer.headers["x-request-id"]
        found = eventually(
            lambda: self.control(f"/requests/{name}"), lambda response: response.status_code == 200
        )
        summary: dict[str, Any] = found.json()
        return summary

    def idle(self) -> bool:
        """No page, request, transfer or stream is held anywhere."""
        status = self.control("/status").json()
        return len(status["replicas"]) == 2 and not busy(status)


def busy(status: dict[str, Any]) -> list[str]:
    """What is held, in words."""
    held = []
    for row in status["replicas"]:
        held += [
            f"{row['phase']}: {name} {row[name]}"
            for name in ("running", "waiting", "in_flight_transfers", "bus_queue", "inside")
            if row[name]
        ]
        if row["free_pages"] != row["total_pages"]:
            held.append(f"{row['phase']}: {row['total_pages'] - row['free_pages']} pages")
    return held + [
        f"gateway: {name} {row[name]}"
        for row in status["gateways"]
        for name in ("in_flight", "places", "subscriptions")
        if row[name]
    ]


def eventually(
    ask: Callable[[], Any], good: Callable[[Any], bool], *, within_s: float = 10.0, what: str = "good answer"
) -> Any:
    """The first good answer.

    Raises:
        AssertionError: none came in time; it names the last one.
    """
    end = time.monotonic() + within_s
    while not good(answer := ask()):
        assert time.monotonic() < end, f"no {what} within {within_s} s: {answer}"
        time.sleep(0.05)
    return answer


@contextmanager
def running_stack(folder: Path, *, profile: str, config: dict[str, Any]) -> Iterator[Stack]:
    """Started, ready, and stopped at the end."""
    state, file = folder / "state", folder / "phasegate.yaml"
    port = free_port()
    usual = {"mode": "dev", "profile": profile, "port": port, "internal_port": free_port()}
    file.write_text(yaml.safe_dump({**usual, **config}))
    words = ("up", "--config", str(file), "--state", str(state), "--detach")
    try:
        started = cli(*words, timeout_s=START_TIMEOUT_S)
        assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
        local = json.loads((state / "local.json").read_text())
        yield Stack(state, local["base_url"], local["account_id"], local["api_key"], local["models"][0])
    finally:
        cli("down", "--state", str(state), timeout_s=120)


def processes_of(state: Path) -> list[psutil.Process]:
    """Everything that a supervisor of this state folder has started and that still lives."""
    from deploy.processes import marked
    from deploy.state import StateDir

    return marked(StateDir(state).marker)
