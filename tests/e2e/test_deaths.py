"""Every process of the system is killed with SIGKILL under eight requests: nobody hangs, nobody is told lies.

The measured table goes to the file that `DEATHS_JSON` names; `docs/operations.md` shows it.
"""

import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.support.deaths import Crowd, Probes, table
from tests.support.stack import ROOT, START_TIMEOUT_S, Stack, cli, eventually, free_port, processes_of

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

TOKENS = 80
ENDS_WITHIN_S = 5.0
RECOVERS_WITHIN_S = 180.0
PROBE = {"prompt": "The capital of France is", "raw": True, "max_tokens": 4, "temperature": 0}

Find = Callable[[Stack], int]


class System:
    """The system under test; started anew when a kill has ended it."""

    def __init__(self, folder: Path) -> None:
        self._state, self._file = folder / "state", folder / "phasegate.yaml"
        self._file.write_text(
            yaml.safe_dump(
                {"mode": "production", "profile": "exact", "port": free_port(), "internal_port": 0}
            )
        )
        self.stack = self.up()
        self.bodies = [(body, self._answer(body)) for body in bodies()]
        self.probe = self._answer(PROBE)

    def up(self) -> Stack:
        words = ("up", "--config", str(self._file), "--state", str(self._state), "--detach")
        started = cli(*words, timeout_s=START_TIMEOUT_S)
        assert started.returncode == 0, f"{started.stdout}\n{started.stderr}"
        local = json.loads((self._state / "local.json").read_text())
        self.stack = Stack(
            self._state, local["base_url"], local["account_id"], local["api_key"], local["models"][0]
        )
        return self.stack

    def down(self) -> None:
        cli("down", "--state", str(self._state), timeout_s=120)

    def alive(self) -> bool:
        return (self._state / "local.json").exists() and bool(processes_of(self._state))

    def said(self) -> str:
        return (self._state / "logs" / "supervisor.log").read_text()

    def _answer(self, body: dict[str, Any]) -> str:
        """The undisturbed answer."""
        plain = {**body, "stream": False}
        answer = httpx.post(self.stack.run_url, json=plain, headers=self.stack.headers, timeout=120)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["result"]["response"]
        return text


def bodies() -> list[dict[str, Any]]:
    """Eight different prompts of several pages, six streamed and two whole."""
    numbers = " ".join(map(str, range(100)))
    return [
        {
            "prompt": f"List {place}, from the beginning: {numbers}",
            "raw": True,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": place < 6,
        }
        for place in range(8)
    ]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("deaths"))
    try:
        yield system
    finally:
        system.down()


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, dict[str, Any]]]:
    """By kind: what was measured. Written and printed at the end."""
    measured: dict[str, dict[str, Any]] = {}
    yield measured
    file = Path(os.environ.get("DEATHS_JSON", os.devnull))
    before = json.loads(file.read_text())["rows"] if file.is_file() else []
    rows = {row["killed"]: row for row in [*before, *measured.values()]}
    ordered = [rows[kind] for kind in (*REPLACED, *ENDS_ALL) if kind in rows]
    result = {"manifest": manifest(), "rows": ordered}
    tell(table(result))
    if file.name != "null":
        file.write_text(json.dumps(result, indent=2) + "\n")


def tell(text: str) -> None:
    """Seen with `pytest -s`, and with `-rA` at the end."""
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


def commit() -> str:
    """Of each row: kinds may be measured apart."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def manifest() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "command": "DEATHS_JSON=docs/results/deaths.json make check-long PART=deaths",
        "profile": "exact",
        "clients": 8,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def replica(phase: str) -> Find:
    return lambda stack: next(row["pid"] for row in stack.status()["replicas"] if row["phase"] == phase)


def engine(phase: str) -> Find:
    def find(stack: Stack) -> int:
        children = psutil.Process(replica(phase)(stack)).children(recursive=True)
        return next(p.pid for p in children if "EngineCore" in " ".join([p.name(), *p.cmdline()]))

    return find


def gateway(stack: Stack) -> int:
    pid: int = stack.status()["gateways"][0]["pid"]
    return pid


def named(*words: str) -> Find:
    def find(stack: Stack) -> int:
        for process in processes_of(stack.state):
            called = " ".join([process.name(), *process.cmdline()[:1]])
            if any(word in called for word in words):
                return process.pid
        raise AssertionError(f"no process is called {words}")

    return find


def supervisor(stack: Stack) -> int:
    pid: int = json.loads((stack.state / "runtime.json").read_text())["pid"]
    return pid


REPLACED: dict[str, tuple[Find, str]] = {
    "redis": (named("redis-server"), "none"),
    "decode engine": (engine("decode"), "explicit"),
    "decode replica": (replica("decode"), "explicit"),
    "prefill engine": (engine("prefill"), "explicit"),
    "prefill replica": (replica("prefill"), "explicit"),
    "gateway replica": (gateway, "cut"),
    "HAProxy": (named("haproxy"), "cut"),
    "HAProxy's manager in Serve": (named("ray::HAProxyManager"), "cut"),
    "Serve controller": (named("ray::ServeController"), "none"),
}
"""By name: how it is found, and how clients in flight may notice: not at all, by an error, by a cut."""
ENDS_ALL: dict[str, Find] = {
    "Ray control service (GCS)": named("gcs_server"),
    "Ray node process (raylet)": named("raylet"),
    "supervisor": supervisor,
}


def crowd_in_flight(system: System, *, early: bool) -> Crowd:
    """Eight requests, each with text already, or (`early`) while their prompts are being computed."""
    # Nothing of it lies in a prefix cache: every prompt is computed by prefill and travels.
    fresh = [({**body, "cache_salt": secrets.token_hex(8)}, expected) for body, expected in system.bodies]
    crowd = Crowd(system.stack, fresh)
    crowd.start()
    if early:
        eventually(
            lambda: system.stack.control("/status").json(),
            lambda status: all_inside(status, len(fresh)),
            within_s=30,
        )
    else:
        streams = [seen for seen, (body, _) in zip(crowd.seen, system.bodies, strict=True) if body["stream"]]
        eventually(lambda: [s for s in streams if s.first_at is None], lambda left: not left, within_s=60)
    return crowd


def all_inside(status: dict[str, Any], clients: int) -> bool:
    """The gateway has placed all of them, and prefill is not through with them."""
    prefill = [row["running"] + row["waiting"] for row in status["replicas"] if row["phase"] == "prefill"]
    return status["gateways"][0]["in_flight"] == clients and sum(prefill) > 0


@pytest.mark.parametrize("kind", REPLACED)
def test_what_is_killed_is_replaced(kind: str, system: System, rows: dict[str, dict[str, Any]]) -> None:
    find, noticed = REPLACED[kind]
    stack = system.stack
    eventually(stack.idle, bool, within_s=60)
    pid = find(stack)
    crowd = crowd_in_flight(system, early=kind.startswith("prefill"))

    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    probes = Probes(stack, PROBE, system.probe, killed_at)
    probes.run(within_s=RECOVERS_WITHIN_S)
    crowd.join()
    row = {
        **{"killed": kind, **crowd.row(killed_at), **probes.row()},
        **{"by": "itself", "commit": commit()},
    }
    rows[kind] = row
    tell(json.dumps(row))

    assert (row["wrong"], row["hung"]) == (0, 0), row
    assert probes.recovered_s is not None, row
    assert probes.without_retry_after == 0, row
    if noticed == "none":
        assert row["right"] == len(crowd.seen), row
    if noticed == "explicit":
        assert row["cut"] == 0, row
    assert (row["last_failure_s"] or 0) <= ENDS_WITHIN_S, row
    eventually(lambda: not psutil.pid_exists(pid) or zombie(pid), bool, within_s=10)
    eventually(stack.idle, bool, within_s=60)


def zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return True


@pytest.mark.parametrize("kind", ENDS_ALL)
def test_what_cannot_be_replaced_ends_all_and_the_next_start_is_clean(
    kind: str, system: System, rows: dict[str, dict[str, Any]]
) -> None:
    stack = system.stack if system.alive() else system.up()
    eventually(stack.idle, bool, within_s=60)
    pid = ENDS_ALL[kind](stack)
    scratch = json.loads((stack.state / "runtime.json").read_text())["scratch"]
    shared = set(os.listdir("/dev/shm"))
    crowd = crowd_in_flight(system, early=False)

    os.kill(pid, signal.SIGKILL)
    killed_at = time.monotonic()
    eventually(lambda: processes_of(stack.state), lambda left: not left, within_s=60)
    ended_s = time.monotonic() - killed_at
    crowd.join()
    if kind != "supervisor":
        assert f"pid {pid}) is gone" in system.said()
        assert not (stack.state / "local.json").exists()
    began = time.monotonic()
    system.up()
    probes = Probes(system.stack, PROBE, system.probe, began)
    probes.run(within_s=RECOVERS_WITHIN_S)
    row = {
        **{"killed": kind, **crowd.row(killed_at), **probes.row()},
        **{"by": "phasegate up", "commit": commit()},
        **{"next": ["connection refused"], "all_ended_s": round(ended_s, 1)},
    }
    rows[kind] = row
    tell(json.dumps(row))

    assert (row["wrong"], row["hung"]) == (0, 0), row
    assert probes.recovered_s is not None, row
    assert not Path(scratch).exists()
    assert set(os.listdir("/dev/shm")) <= shared
