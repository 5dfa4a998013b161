import json
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.state import open_state
from deploy.trace_files import Event, SpanFile, SpanRecord
from deploy.trace_view import complete, find, text, to_json, tree, walk
from tests.unit.deploy.test_tracing import record

MS = 1_000_000
TRACE = "ab" * 16


def span(name: str, span_id: str, parent: str, start: float, end: float, **changes: object) -> SpanRecord:
    return record(
        name, span_id=span_id, parent_id=parent, start_ns=int(start * MS), end_ns=int(end * MS), **changes
    )


def request(name: str, at: float = 100.0, label: str = "mine") -> list[SpanRecord]:
    """A request of 90 ms, with spans of two processes, in no order."""
    root = f"{name}0"
    attributes = {"phasegate.request_id": name, "phasegate.label": label, "phasegate.stream": True}
    return [
        span("transfer", f"{name}4", f"{name}3", at + 12, at + 20, process="decode", pid=9),
        span(
            *("decode", f"{name}3", root, at + 10, at + 80),
            process="decode",
            pid=9,
            events=(Event(name="first_token", at_ns=int((at + 30) * MS)),),
        ),
        span("first_token", f"{name}2", root, at + 9, at + 31),
        span("admission", f"{name}1", root, at, at + 5),
        span("request", root, "client", at, at + 90, attributes=attributes),
    ]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    state = open_state(tmp_path / "s")
    for process, spans in (
        ("gateway", [s for s in request("r1") if s.process == "gateway"]),
        ("decode", [s for s in request("r1") if s.process == "decode"]),
        ("other", request("r2", at=500.0)),
    ):
        file = SpanFile(state.logs / f"trace-{process}-x.jsonl")
        file.write(spans)
        file.close()
    return state.logs


def test_spans_of_all_processes_are_one_tree_in_order_of_time(logs: Path) -> None:
    root = find(logs, "r1")

    assert root is not None
    assert [(depth, node.span.name) for depth, node in walk(root)] == [
        (0, "request"),
        (1, "admission"),
        (1, "first_token"),
        (1, "decode"),
        (2, "transfer"),
    ]


def test_two_requests_of_one_trace_are_kept_apart_and_a_label_means_the_latest(logs: Path) -> None:
    by_label, by_trace = find(logs, "mine"), find(logs, TRACE)

    assert by_label is not None
    assert by_trace is not None
    assert by_label.span.attributes["phasegate.request_id"] == "r2"
    assert by_trace.span.span_id == "r20"
    assert {node.span.span_id[:2] for _, node in walk(by_label)} == {"r2"}


@pytest.mark.parametrize("name", ["", "r", "r10", "nobody", "true", "request", "a\nb", '"r1"'])
def test_what_no_request_is_called_is_not_found(logs: Path, name: str) -> None:
    assert find(logs, name) is None


def test_the_tree_tells_offsets_durations_processes_and_facts(logs: Path) -> None:
    root = find(logs, "r1")

    assert root is not None
    assert text(root).splitlines() == [
        f"request r1  label mine  trace {TRACE}",
        "",
        "START ms  TAKES ms  SPAN               PROCESS",
        "     0.0      90.0  request            gateway 7  stream=true",
        "     0.0       5.0    admission        gateway 7",
        "     9.0      22.0    first_token      gateway 7",
        "    10.0      70.0    decode           decode 9",
        "    30.0                - first_token",
        "    12.0       8.0      transfer       decode 9",
    ]


def test_as_json_times_are_milliseconds_from_the_arrival(logs: Path) -> None:
    root = find(logs, "r1")
    assert root is not None
    decode = to_json(root)["children"][2]

    assert (decode["name"], decode["start_ms"], decode["duration_ms"]) == ("decode", 10.0, 70.0)
    assert decode["events"] == [{"name": "first_token", "at_ms": 30.0}]
    assert decode["parent_id"] == to_json(root)["span_id"]
    assert decode["children"][0]["pid"] == 9


def test_what_an_event_knows_stands_beside_it() -> None:
    event = Event(
        name="page_integrity_fault",
        at_ns=int(5 * MS),
        attributes={"phasegate.cause": "freed", "phasegate.page": 7},
    )
    root = tree(span("request", "a", "", 0, 9, events=(event,)), [])

    assert text(root).splitlines()[-1].split() == [
        "5.0",
        "-",
        "page_integrity_fault",
        "cause=freed",
        "page=7",
    ]
    assert to_json(root)["events"] == [
        {"name": "page_integrity_fault", "at_ms": 5.0, "attributes": {"cause": "freed", "page": 7}}
    ]


def test_an_error_is_told_with_its_word() -> None:
    from deploy.trace_view import tree

    root = tree(span("request", "a", "", 0, 1, error="engine_lost"), [])

    assert text(root).splitlines()[-1].endswith("ERROR=engine_lost")


def test_spans_that_name_each_other_as_parents_do_not_hang_the_reader() -> None:
    from deploy.trace_view import tree

    first, second = span("request", "a", "b", 0, 1), span("decode", "b", "a", 0, 1)

    assert [node.span.name for _, node in walk(tree(first, [first, second]))] == [
        "request",
        "decode",
        "request",
    ]


def test_a_request_whose_engines_have_not_written_yet_is_not_complete(logs: Path) -> None:
    whole = find(logs, "r1")
    assert complete(whole)
    assert whole is not None
    whole.children = [child for child in whole.children if child.span.name != "decode"]
    assert not complete(whole)
    whole.children = whole.children[:1]  # refused before any engine was called
    assert complete(whole)
    assert not complete(None)


def test_the_command_prints_the_tree_and_json(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = str(logs.parent)

    assert main(["trace", "r1", "--state", state]) == 0
    assert "transfer" in capsys.readouterr().out
    assert main(["trace", "mine", "--json", "--state", state]) == 0
    assert json.loads(capsys.readouterr().out)["attributes"]["request_id"] == "r2"


def test_an_unknown_request_is_told_in_one_line(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "nobody", "--state", str(logs.parent)]) == 1

    said = capsys.readouterr().err
    assert "no trace of 'nobody'" in said
    assert said.count("\n") == 1
