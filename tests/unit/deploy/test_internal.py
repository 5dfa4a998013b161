import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.cluster_environment import make_token
from deploy.control import ControlServer, Internal, ask
from deploy.internal import InternalPortError, listen
from deploy.metrics_page import ProcessPage
from deploy.trace_files import SpanFile
from tests.unit.deploy.test_control import Fleet
from tests.unit.deploy.test_tracing import record

PAGES = [
    ProcessPage(process="gateway", replica="g", text="# TYPE phasegate_x counter\nphasegate_x_total 3\n"),
    ProcessPage(process="decode", replica="d", text=None),
]
GUARDED = ("/metrics", "/debug/requests/known", "/debug/traces/mine", "/nowhere", "/", "/healthz/x")


class Watched(Fleet):
    async def metrics(self) -> list[ProcessPage]:
        return PAGES

    async def request(self, request_id: str) -> dict[str, Any] | None:
        return {"pages": 2} if request_id == "a/b:1" else None


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    file = SpanFile(tmp_path / "trace-gateway-g.jsonl")
    file.write([record(attributes={"phasegate.label": "mine"})])
    file.close()
    return tmp_path


@pytest.fixture
def url(logs: Path) -> Iterator[str]:
    """Of an internal listener whose token is `t0ken`."""
    listener = listen(0)
    server = ControlServer(logs / "c.sock", threading.Event().set, Internal(listener, "t0ken", logs))
    server.start()
    server.use(Watched, "ready")
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.close()


def get(url: str, authorization: str | bytes | None = "Bearer t0ken") -> httpx.Response:
    headers: dict[str, Any] = {} if authorization is None else {"authorization": authorization}
    return httpx.get(url, headers=headers, timeout=5, trust_env=False)


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    "authorization", [None, "Bearer", "Bearer t0ke", "Bearer t0kenn", "Basic t0ken", "t0ken", b"Bearer \xe9"]
)
def test_without_the_token_there_is_no_answer(url: str, path: str, authorization: str | bytes | None) -> None:
    answer = get(url + path, authorization)

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "phasegate_" not in answer.text


def test_health_needs_no_token_and_tells_nothing(url: str) -> None:
    assert get(f"{url}/healthz", None).json() == {"status": "ok"}


def test_metrics_are_those_of_every_process(url: str) -> None:
    answer = get(f"{url}/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'phasegate_x_total{process="gateway",replica="g"} 3.0' in answer.text
    assert 'phasegate_replica_up{process="decode",replica="d"} 0.0' in answer.text


def test_a_request_is_found_by_any_name_that_a_label_may_have(url: str) -> None:
    assert get(f"{url}/debug/requests/a/b:1").json() == {"pages": 2}
    assert get(f"{url}/debug/requests/other").status_code == 404


def test_a_trace_is_found(url: str) -> None:
    assert get(f"{url}/debug/traces/mine").json()["name"] == "request"
    assert get(f"{url}/debug/traces/other").status_code == 404


def test_the_socket_answers_beside_it_and_both_end_together(logs: Path) -> None:
    listener = listen(0)
    port = listener.getsockname()[1]
    server = ControlServer(logs / "c.sock", threading.Event().set, Internal(listener, "t0ken", logs))
    server.start()

    assert ask(str(logs / "c.sock"), "GET", "/status") == {"profile": None, "replicas": [], "gateways": []}
    assert get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    server.close()
    with pytest.raises(httpx.ConnectError):
        get(f"http://127.0.0.1:{port}/healthz")


def test_a_taken_port_is_told_by_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InternalPortError, match=rf"internal_port: {port} on 127\.0\.0\.1 cannot be used"):
            listen(port)


def test_the_token_is_in_no_printout_and_its_file_is_private(tmp_path: Path) -> None:
    make_token(tmp_path / "internal-token")
    token = (tmp_path / "internal-token").read_text()
    with listen(0) as listener:
        assert token not in repr(Internal(listener, token, tmp_path))

    assert len(token) == 64
    assert stat.S_IMODE((tmp_path / "internal-token").stat().st_mode) == 0o600
