"""The harness that watches deaths is itself watched: it must not call a lie right, or a hang an end."""

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.deaths import Crowd, Probes, Seen, ask, table
from tests.support.stack import Stack

ROW = {
    **{"killed": "decode engine", "right": 0, "error": 8, "cut": 0, "wrong": 0, "hung": 0},
    **{"codes": ["engine_lost"], "last_failure_s": 0.3, "next": ["engines_unavailable"]},
    **{"next_slowest_s": 0.1, "without_retry_after": 0, "recovered_s": 21.5, "by": "itself"},
}


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (Seen("abc", text="abc", whole=True, ended=1.0), "right"),
        (Seen("abc", text="abd", whole=True, ended=1.0), "wrong"),
        (Seen("abc", text="ab", whole=True, ended=1.0), "wrong"),
        (Seen("abc", text="ab", error="engine_lost", ended=1.0), "error"),
        (Seen("abc", text="ax", error="engine_lost", ended=1.0), "wrong"),
        (Seen("abc", text="ab", ended=1.0), "cut"),
        (Seen("abc", text="abc", ended=1.0), "cut"),
        (Seen("abc", text="b", ended=1.0), "wrong"),
        (Seen("abc", text="ab"), "hung"),
        (Seen("abc"), "hung"),
    ],
)
def test_what_a_client_saw_has_one_name(seen: Seen, outcome: str) -> None:
    assert seen.outcome == outcome


def test_the_table_tells_counts_codes_and_times() -> None:
    ended = {"killed": "supervisor", "cut": 8, "error": 0, "by": "phasegate up", "all_ended_s": 2.5}
    lines = table({"rows": [ROW, ROW | ended | {"next": ["connection refused"]}]})

    assert lines.splitlines()[2:] == [
        "| decode engine | 8 explicit error (`engine_lost`), the last after 0.3 s | "
        "`engines_unavailable`, each within 0.1 s | 21.5 s |",
        "| supervisor | 8 ended without `[DONE]`, the last after 0.3 s | "
        "connection refused; every process had ended after 2.5 s | 21.5 s, by `phasegate up` |",
    ]


STREAMS = {
    "right": 'data: {"response": "a"}\n\ndata: {"response": "b"}\n\ndata: [DONE]\n\n',
    "error": 'data: {"response": "a"}\n\ndata: {"error": {"code": "engine_lost"}}\n\n',
    "cut": 'data: {"response": "a"}\n\n',
    "wrong": 'data: {"response": "x"}\n\ndata: [DONE]\n\n',
}


@contextmanager
def answering(status: int, body: str, headers: dict[str, str] | None = None) -> Iterator[Stack]:
    """A server that gives every request the same answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Nothing to the terminal."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Stack(Path("/"), f"http://127.0.0.1:{server.server_port}", "account", "key", "model")
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("outcome", STREAMS)
def test_streams_are_read_as_a_client_reads_them(outcome: str) -> None:
    with answering(200, STREAMS[outcome]) as stack:
        crowd = Crowd(stack, [({"stream": True}, "ab")] * 3)
        crowd.start()
        crowd.join()
        row = crowd.row(killed_at=0.0)

    assert row[outcome] == 3
    assert sum(row[name] for name in ("right", "error", "cut", "wrong", "hung")) == 3
    assert (row["last_failure_s"] is None) is (outcome == "right")


def test_a_refusal_is_an_explicit_error_with_its_code() -> None:
    seen = Seen("ab")
    with answering(503, '{"error": {"code": "engines_unavailable"}}') as stack:
        ask(stack, seen, {"stream": False})

    assert (seen.outcome, seen.error) == ("error", "engines_unavailable")


def test_a_connection_that_nobody_takes_is_a_cut_and_no_hang() -> None:
    seen = Seen("ab")
    with answering(200, "") as stack:
        pass
    ask(stack, seen, {"stream": True})

    assert (seen.outcome, seen.failure) == ("cut", "ConnectError")


@pytest.mark.parametrize(
    ("headers", "missing"), [({"retry-after": "1"}, 0), ({}, 1), ({"retry-after": "x"}, 1)]
)
def test_a_refusal_must_say_when_to_come_again(headers: dict[str, str], missing: int) -> None:
    with answering(503, '{"error": {"code": "engines_unavailable"}}', headers) as stack:
        probes = Probes(stack, {}, "ab", killed_at=0.0)
        assert not probes._right()

    assert probes.without_retry_after == missing
    assert probes.row()["next"] == ["engines_unavailable"]
    assert probes.recovered_s is None
