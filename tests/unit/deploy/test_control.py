import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest

from deploy import integrity_view, status_view
from deploy.cli import main
from deploy.control import ControlError, ControlServer, ask, status_json
from deploy.metrics_page import ProcessPage
from deploy.state import Runtime, StateLock, open_state, write_private
from kv_transfer.api import NOTHING_CHECKED, Coverage, LedgerPage, LedgerRow, LedgerSnapshot
from workers.api import Phase, ReplicaIntegrity, ReplicaStatus

WHY = "the gateway and decode replica b differ in rope: theta 10000 against 100000"
GATEWAY: dict[str, Any] = {
    "id": "g",
    "pid": 3,
    "in_flight": 0,
    "contract": "fp_a",
    "drifted": [{"id": "b", "phase": "decode", "contract": "fp_b", "why": WHY}],
}
PROFILE: dict[str, str | None] = {"name": "small", "instead": None}
CHECKED = Coverage(ledger="generation", checked=("writes", "copies"), unchecked=())


def replica(name: str) -> ReplicaStatus:
    others = ("id", "phase", "format", "contract", "integrity")
    numbers = {field.name: 1 for field in fields(ReplicaStatus) if field.name not in others}
    integrity = ReplicaIntegrity(
        device="cpu",
        since=1_700_000_000,
        coverage=NOTHING_CHECKED if name == "b" else CHECKED,
        steps_checked=7,
        steps_unchecked=8,
        pages_checked=9,
        mismatches={"stale_prefix": 3, "freed": 1} if name == "a" else {},
    )
    return ReplicaStatus(
        id=name, phase=Phase.DECODE, format="bf16", contract=f"fp_{name}", integrity=integrity, **numbers
    )


class Fleet:
    async def replicas(self) -> list[ReplicaStatus]:
        return [replica("b"), replica("a")]

    async def gateways(self) -> list[dict[str, Any]]:
        return [GATEWAY]

    async def request(self, request_id: str) -> dict[str, Any] | None:
        return {"pages": 2} if request_id == "known" else None

    async def drain(self, grace_s: float) -> list[dict[str, int]]:
        if grace_s > 5:
            raise RuntimeError("no gateway")
        return [{"found": 2, "cut": int(grace_s)}]

    async def ledgers(self, only: str | None) -> dict[str, LedgerSnapshot]:
        row = LedgerRow(request_id="r1", group=0, pages=(3, 4), tags=(0x300, 0))
        page = LedgerPage(page=3, tag=0x300, owners=("r1", "r2"), writer="r1")
        known = {
            "d": LedgerSnapshot(ledger="generation", rows=(row,), pages=(page,)),
            "a": LedgerSnapshot(ledger="null"),
        }
        return {name: ledger for name, ledger in known.items() if only in {None, name}}

    async def metrics(self) -> list[ProcessPage]:
        return [ProcessPage(process="decode", replica="d", text=None)]


@pytest.fixture
def stopped() -> threading.Event:
    return threading.Event()


@pytest.fixture
def socket(stopped: threading.Event) -> Iterator[str]:
    with TemporaryDirectory(prefix="pg") as folder:
        server = ControlServer(Path(folder) / "control.sock", stopped.set, profile=PROFILE)
        server.start()
        server.use(Fleet, "ready")
        yield str(Path(folder) / "control.sock")
        server.close()
        assert not (Path(folder) / "control.sock").exists()


def test_status_lists_gauges_sorted_by_id(socket: str) -> None:
    answer = ask(socket, "GET", "/status")

    assert [row["id"] for row in answer["replicas"]] == ["a", "b"]
    assert set(answer["replicas"][0]) == {
        *("id", "phase", "format", "pid", "free_pages", "total_pages", "running", "waiting"),
        *("in_flight_transfers", "bus_queue", "inside", "contract", "integrity"),
    }
    assert answer["gateways"] == [GATEWAY]
    assert answer["profile"] == PROFILE


def test_status_tells_what_each_replica_checks_and_has_found(socket: str) -> None:
    head, first, second, *checks = integrity_view.text(ask(socket, "GET", "/status")["replicas"]).splitlines()

    assert [line.split() for line in (first, second)] == [
        [
            *("a", "decode", "generation", "bf16", "cpu", "2023-11-14T22:13:20Z"),
            *("7", "8", "9", "freed", "1,", "stale_prefix", "3"),
        ],
        ["b", "decode", "null", "bf16", "cpu", "2023-11-14T22:13:20Z", "7", "8", "9", "none"],
    ]
    assert first.index("freed") == head.index("MISMATCHES")
    assert checks == [
        "a checks: writes, copies",
        "b checks: nothing",
        f"b does not check: {', '.join(NOTHING_CHECKED.unchecked)}",
    ]


@pytest.fixture
def running(socket: str, tmp_path: Path) -> Iterator[str]:
    """The state folder of a system that seems to run, and answers at the socket."""
    state = open_state(tmp_path / "state")
    runtime = Runtime(pid=os.getpid(), control_socket=socket, scratch=str(tmp_path))
    lock = StateLock(state)
    lock.acquire()
    write_private(state.runtime, asdict(runtime))
    yield str(state.root)
    lock.release()


def test_a_ledger_is_told_by_ids_and_one_that_is_off_says_so(
    running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "ledger", "--state", running]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: no ledger: integrity is off, or the engine has no pages of a model",
        "d: 1 rows, 1 pages with an owner",
        "  row   r1  group 0  3:300 4:-",
        "  page  3  tag 300  owners r1, r2  writer r1",
    ]
    assert main(["debug", "ledger", "a", "--json", "--state", running]) == 0
    assert json.loads(capsys.readouterr().out) == {"a": {"ledger": "null", "rows": [], "pages": []}}


def test_a_ledger_of_an_unknown_replica_is_an_error_that_names_it(
    running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "ledger", "x&y", "--state", running]) == 1
    assert "no replica x&y answers" in capsys.readouterr().err


def test_status_names_who_gets_no_requests_and_what_differs(
    running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--state", running]) == 0
    profile, head, first, second, gateway, drifted, rest = capsys.readouterr().out.splitlines()

    assert profile == "profile small"
    assert first.split() == ["a", "decode", "bf16", "1", "1/1", *"1111", "fp_a"]
    assert second.split()[-1] == "fp_b"
    assert first.index("fp_a") == head.index("CONTRACT")
    assert gateway == "gateway g  pid 3  in flight 0  contract fp_a"
    assert drifted == f"b gets no requests: {WHY}"
    assert rest == "not ready yet"


def test_status_tells_why_another_profile_runs_than_was_asked_for() -> None:
    why = "profile small is used instead of large: there is no room"
    status = {"profile": {"name": "small", "instead": why}, "replicas": [], "gateways": []}

    assert status_view.text(status).splitlines()[0] == why


def test_the_command_prints_that_table_and_no_other(
    socket: str, running: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--integrity", "--state", running]) == 0
    assert capsys.readouterr().out == integrity_view.text(ask(socket, "GET", "/status")["replicas"]) + "\n"


def test_before_the_application_is_up_status_is_empty() -> None:
    assert status_json([], []) == {"replicas": [], "gateways": []}


def test_figures_of_a_request_are_found_by_its_id(socket: str) -> None:
    assert ask(socket, "GET", "/requests/known") == {"pages": 2}
    with pytest.raises(ControlError, match="unknown request"):
        ask(socket, "GET", "/requests/other")


def test_only_a_post_stops_and_it_is_answered(socket: str, stopped: threading.Event) -> None:
    with pytest.raises(ControlError):
        ask(socket, "GET", "/stop")
    assert not stopped.is_set()

    assert ask(socket, "POST", "/stop")["was"] == "ready"
    assert stopped.is_set()


def test_the_socket_is_for_its_owner_only(socket: str) -> None:
    assert stat.S_IMODE(Path(socket).stat().st_mode) == 0o600


def test_a_socket_that_a_dead_supervisor_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / "c"
    left.touch()
    server = ControlServer(left, lambda: None)

    server.start()

    assert ask(str(left), "GET", "/status") == {"profile": None, "replicas": [], "gateways": []}
    server.close()
    server.close()


def test_a_place_where_nobody_can_listen_is_told(tmp_path: Path) -> None:
    server = ControlServer(tmp_path / "absent" / "control.sock", lambda: None)

    with pytest.raises(ControlError, match=r"cannot listen on .*absent"):
        server.start()


def test_an_application_that_cannot_be_asked_in_time_is_told() -> None:
    slow = threading.Event()

    def make() -> Fleet:
        slow.wait(10)
        return Fleet()

    with TemporaryDirectory(prefix="pg") as folder:
        server = ControlServer(Path(folder) / "c", lambda: None)
        server.start()
        try:
            with pytest.raises(ControlError, match=r"could not be asked within 0\.05 s"):
                server.use(make, "ready", within_s=0.05)
        finally:
            slow.set()
            server.close()


def test_silence_is_told_with_the_socket(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=r"does not answer on .*nobody\.sock"):
        ask(str(tmp_path / "nobody.sock"), "GET", "/status")


@pytest.mark.parametrize(("grace_s", "accounts"), [(1.0, [{"found": 2, "cut": 1}]), (6.0, [])])
def test_draining_tells_what_was_cut_and_a_fleet_that_cannot_is_no_hindrance(
    grace_s: float, accounts: list[dict[str, int]]
) -> None:
    with TemporaryDirectory(prefix="pg") as folder:
        server = ControlServer(Path(folder) / "control.sock", threading.Event().set, grace_s=grace_s)
        server.start()
        server.use(Fleet, "ready")
        try:
            assert server.drain() == accounts
        finally:
            server.close()


def test_down_returns_when_the_process_has_ended_which_is_after_its_folder_is_free(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    lock = StateLock(state)
    lock.acquire()
    with subprocess.Popen(["/bin/sh", "-c", "read _; sleep 0.3"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None

        def stop(told: IO[bytes] = process.stdin) -> None:
            told.close()
            lock.release()

        with TemporaryDirectory(prefix="pg") as folder:
            socket = Path(folder) / "control.sock"
            runtime = Runtime(pid=process.pid, control_socket=str(socket), scratch=str(tmp_path))
            write_private(state.runtime, asdict(runtime))
            server = ControlServer(socket, stop)
            server.start()
            assert main(["down", "--state", str(state.root)]) == 0
            assert process.poll() is not None
            server.close()
