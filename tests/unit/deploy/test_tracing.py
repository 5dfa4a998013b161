import asyncio
import resource
import signal
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Status, StatusCode

from deploy.config import ConfigError, TracingConfig, parse
from deploy.trace_files import SpanFile, SpanRecord, prune, read, rotated, trace_files
from deploy.tracing import FileExporter, start_tracing


def record(name: str = "request", **changes: object) -> SpanRecord:
    usual: dict[str, object] = {
        "trace_id": "ab" * 16,
        "span_id": "cd" * 8,
        "parent_id": "",
        "name": name,
        "process": "gateway",
        "replica": "g1",
        "pid": 7,
        "start_ns": 1,
        "end_ns": 2,
    }
    return SpanRecord(**(usual | changes))  # type: ignore[arg-type]


async def test_finished_spans_are_in_a_private_file_of_the_process_after_close(tmp_path: Path) -> None:
    tracing = start_tracing(TracingConfig(), "decode", "r1", tmp_path)
    assert tracing.tracer is not None
    span = tracing.tracer.start_span("decode", attributes={"phasegate.pages": 3}, start_time=10)
    span.add_event("first_token", timestamp=15)
    span.add_event("page_integrity_fault", {"phasegate.page": 4, "phasegate.list": (1, 2)}, timestamp=16)
    span.set_status(Status(StatusCode.ERROR, "busy"))
    span.end(20)
    await tracing.close()

    (file,) = trace_files(tmp_path)
    (found,) = read(tmp_path)
    assert file.name == "trace-decode-r1.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (found.name, found.process, found.replica, found.error) == ("decode", "decode", "r1", "busy")
    assert (found.start_ns, found.end_ns, found.parent_id) == (10, 20, "")
    assert found.attributes == {"phasegate.pages": 3}
    assert [(event.name, event.at_ns, event.attributes) for event in found.events] == [
        ("first_token", 15, {}),
        ("page_integrity_fault", 16, {"phasegate.page": 4}),
    ]


async def test_at_ratio_zero_nothing_is_written(tmp_path: Path) -> None:
    tracing = start_tracing(TracingConfig(sample_ratio=0.0), "gateway", "g1", tmp_path)
    assert tracing.tracer is not None
    tracing.tracer.start_span("request").end()
    await tracing.close()

    assert list(read(tmp_path)) == []


async def test_without_a_place_for_spans_there_is_no_tracer(tmp_path: Path) -> None:
    tracing = start_tracing(TracingConfig(file=False), "gateway", "g1", tmp_path)
    await tracing.close()

    assert tracing.tracer is None
    assert trace_files(tmp_path) == []


async def test_a_collector_gets_the_spans_over_otlp(tmp_path: Path) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        tracing = start_tracing(TracingConfig(otlp_endpoint=endpoint, file=False), "prefill", "p1", tmp_path)
        assert tracing.tracer is not None
        tracing.tracer.start_span("prefill").end()
        await tracing.close()
        server.shutdown()

    ((path, body),) = got
    sent = ExportTraceServiceRequest.FromString(body).resource_spans[0]
    assert path == "/v1/traces"
    assert sent.scope_spans[0].spans[0].name == "prefill"
    assert {a.key: a.value.string_value for a in sent.resource.attributes}["service.name"] == (
        "phasegate-prefill"
    )


async def test_a_collector_that_is_not_there_does_not_hold_up_the_end(tmp_path: Path) -> None:
    tracing = start_tracing(
        TracingConfig(otlp_endpoint="http://127.0.0.1:9/v1/traces", file=False),
        "gateway",
        "g1",
        tmp_path,
        patience_s=0.2,
    )
    assert tracing.tracer is not None
    tracing.tracer.start_span("request").end()

    await asyncio.wait_for(tracing.close(), 10)


def test_a_full_file_is_set_aside_once_and_both_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace-gateway-g1.jsonl"
    file = SpanFile(path, max_bytes=600)
    for number in range(40):
        file.write([record(f"n{number:02}")])
    file.close()

    names = [found.name for found in read(tmp_path)]
    assert "n39" in names
    assert rotated(path).exists()
    assert all(one.stat().st_size <= 600 for one in trace_files(tmp_path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_is_taken_up_again_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "trace-gateway-g1.jsonl"
    for name in ("one", "two"):
        file = SpanFile(path)
        file.write([record(name)])
        file.close()

    assert [found.name for found in read(tmp_path)] == ["one", "two"]


def test_a_line_cut_off_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    file = SpanFile(tmp_path / "trace-gateway-g1.jsonl")
    file.write([record("whole")])
    file.close()
    with (tmp_path / "trace-gateway-g1.jsonl").open("a") as end:
        end.write('{"trace_id": "ab')

    assert [found.name for found in read(tmp_path)] == ["whole"]


def test_a_full_disk_costs_the_spans_of_that_time_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace-gateway-g1.jsonl"
    path.symlink_to("/dev/full")
    file = SpanFile(path)
    exporter = FileExporter(file, "gateway", "g1")
    provider = TracerProvider(shutdown_on_exit=False)
    span = provider.get_tracer("tests").start_span("request")
    span.end()
    assert isinstance(span, ReadableSpan)

    assert exporter.export([span]) is SpanExportResult.FAILURE
    exporter.shutdown()


def test_after_a_torn_line_the_next_one_is_whole(tmp_path: Path) -> None:
    """A limit on the size of files tears a write as a full disk does."""
    path = tmp_path / "trace-gateway-g1.jsonl"
    file = SpanFile(path)
    file.write([record("before")])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, usual[1]))
        with pytest.raises(OSError, match="space"):
            file.write([record("torn")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, heard)
    file.write([record("after")])
    file.close()

    assert [found.name for found in read(tmp_path)] == ["before", "after"]


def test_a_file_that_goes_away_while_files_are_listed_is_passed_over(tmp_path: Path) -> None:
    """A process renames its file when that is full: whoever reads meanwhile must not fail."""
    SpanFile(tmp_path / "trace-gateway-a.jsonl").close()
    (tmp_path / "trace-gateway-b.jsonl").symlink_to(tmp_path / "gone")

    assert [path.name for path in trace_files(tmp_path)] == ["trace-gateway-a.jsonl", "trace-gateway-b.jsonl"]
    assert list(read(tmp_path)) == []


def test_the_newest_files_are_kept(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"trace-decode-r{number}.jsonl").touch()
    (tmp_path / "decode-r0.log").touch()

    prune(tmp_path, keep=2)

    assert len(trace_files(tmp_path)) == 2
    assert (tmp_path / "decode-r0.log").exists()


@pytest.mark.parametrize(
    ("tracing", "said"),
    [
        ({"sample_ratio": 1.5}, "tracing.sample_ratio: Input should be less than or equal to 1"),
        ({"sample_ratio": -0.1}, "tracing.sample_ratio: Input should be greater than or equal to 0"),
        ({"otlp_endpoint": "collector:4317"}, "otlp_endpoint must start with http"),
        ({"otlp_endpoint": "http:///v1"}, "otlp_endpoint must start with http"),
        ({"otlp_endpoint": "http://me:hunter2@host/v1/traces"}, "must hold no password"),
        ({"otlp_endpoint": "http://host/v1/traces?key=hunter2"}, "must end with its path"),
        ({"otlp_endpoint": "http://host/v1/traces#hunter2"}, "must end with its path"),
        ({"file": "yes"}, "tracing.file"),
    ],
)
def test_a_bad_value_is_named(tracing: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        parse({"tracing": tracing}, source="x.yaml")
    assert "hunter2" not in str(refused.value)
