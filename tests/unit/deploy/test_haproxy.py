"""Our HAProxy configuration: what is taken from Serve's own, and what a running HAProxy makes of it."""

import asyncio
import os
import select
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from deploy import haproxy
from deploy.config import SystemConfig
from deploy.haproxy import Server, UnknownConfiguration, read_targets, render
from deploy.ingress import ANSWERS, prepare, settings_of
from deploy.redis_server import free_port
from tests.support.haproxy import running_haproxy, serves_configuration

TEMPLATE = haproxy.TEMPLATE.read_text()
CONFIG = SystemConfig(port=8600)


def test_replicas_and_socket_are_found_in_what_serve_writes_and_the_silent_fallback_is_left_out(
    tmp_path: Path,
) -> None:
    targets = read_targets(serves_configuration(tmp_path, 30000, 30001).read_text())

    assert targets.admin_socket == str(tmp_path / "ha.sock")
    assert targets.backend == "http-phasegate"
    assert targets.servers == (
        Server("gateway-30000", "127.0.0.1:30000"),
        Server("gateway-30001", "127.0.0.1:30001"),
    )


def test_before_there_is_an_application_nobody_serves(tmp_path: Path) -> None:
    assert read_targets(serves_configuration(tmp_path).read_text()).servers == ()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("stats socket", "stats", "0 admin sockets"),
        ("frontend http_frontend", "frontend web", "no frontend"),
        ("backend default_backend", "backend other\nbackend default_backend", "several applications"),
    ],
)
def test_a_serve_that_words_it_differently_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = serves_configuration(tmp_path, 30000).read_text()

    with pytest.raises(UnknownConfiguration, match=said):
        read_targets(text.replace(old, new))


def test_connections_are_as_many_as_configured_if_the_system_allows_so_many_open_files(
    tmp_path: Path,
) -> None:
    targets = read_targets(serves_configuration(tmp_path, 30000).read_text())
    settings = settings_of(CONFIG, Path("/log"))

    assert "maxconn 16384\n" in render(settings, targets, TEMPLATE, 1_000_000)
    assert f"maxconn {1024 - 256 - 100}\n" in render(settings, targets, TEMPLATE, 1024)
    with pytest.raises(UnknownConfiguration, match="300 open files are too few"):
        render(settings, targets, TEMPLATE, 300)


def test_nothing_listens_but_the_clients_port(tmp_path: Path) -> None:
    targets = read_targets(serves_configuration(tmp_path, 30000).read_text())
    lines = [
        line.split()
        for line in render(settings_of(CONFIG, Path("/log")), targets, TEMPLATE, 20_000).splitlines()
    ]

    assert [words[1] for words in lines if words[:1] == ["bind"]] == ["127.0.0.1:8600"]
    assert not [
        words
        for words in lines
        if words[:1] in (["listen"], ["stats"], ["log"]) and words[1] not in ("socket", "/log", "global")
    ]


def test_a_body_that_cannot_be_quoted_is_refused(tmp_path: Path) -> None:
    targets = read_targets(serves_configuration(tmp_path, 30000).read_text())
    settings = replace(settings_of(CONFIG, Path("/log")), errors={"404": "it's"})

    with pytest.raises(UnknownConfiguration, match="404"):
        render(settings, targets, TEMPLATE, 20_000)


def test_files_of_haproxy_are_private_and_the_plain_proxy_needs_none(tmp_path: Path) -> None:
    environment = prepare(CONFIG, tmp_path, tmp_path)

    folder = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert Path(environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent == folder
    other = tmp_path / "other"
    other.mkdir()
    assert prepare(replace(CONFIG, ingress="proxy"), other, other)["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert list(other.iterdir()) == []


def test_each_answer_of_haproxy_has_a_status_of_its_own() -> None:
    assert len({error.status for error in ANSWERS}) == len(ANSWERS)


@pytest.mark.parametrize(
    "path", ["/-/routes", "/%2D/routes", "/%2d%2froutes", "/-%2fhealthz"], ids=["plain", "1", "2", "3"]
)
async def test_serves_own_routes_are_hidden_however_they_are_spelled(tmp_path: Path, path: str) -> None:
    """The gateway's HTTP server decodes a path before Serve looks at it, and Serve asks for no key."""
    config = replace(CONFIG, port=free_port())
    async with running_haproxy(config, tmp_path, free_port()) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()

    assert answer.split(b" ", 2)[1] == b"404"
    assert b'"not_found"' in answer


async def test_haproxy_listens_where_the_configuration_says_also_on_ipv6(tmp_path: Path) -> None:
    try:
        config = replace(CONFIG, port=free_port("::1"), host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with running_haproxy(config, tmp_path, free_port()):
        reader, writer = await asyncio.open_connection("::1", config.port)
        writer.write(b"GET /-/routes HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()

    assert answer.startswith(b"HTTP/1.1 404 ")


async def test_without_a_gateway_clients_get_our_error_body_with_one_id(tmp_path: Path) -> None:
    config = replace(CONFIG, port=free_port())
    async with (
        running_haproxy(config, tmp_path, free_port()) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        lost = await client.post("/v1/chat/completions", json={}, headers={"x-request-id": "mine-1"})
        odd = await client.get("/v1/models", headers=[("x-request-id", "a b")])
        twice = await client.get("/v1/models", headers=[("x-request-id", "a"), ("x-request-id", "b")])
        inside = await client.get("/-/routes")

    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "gateway_unavailable")
    assert lost.headers["content-type"] == "application/json"
    assert int(lost.headers["retry-after"]) > 0
    assert (inside.status_code, inside.json()["error"]["code"]) == (404, "not_found")
    assert lost.headers.get_list("x-request-id") == lost.headers.get_list("cf-ai-req-id") == ["mine-1"]
    for answer in (odd, twice, inside):
        (name,) = answer.headers.get_list("x-request-id")
        assert answer.headers.get_list("cf-ai-req-id") == [name]
        assert name not in ("a b", "a", "b", "a, b", "")
    assert stat.S_IMODE((tmp_path / "ha.sock").stat().st_mode) == 0o600


def test_haproxy_ends_with_the_process_that_watches_it(tmp_path: Path) -> None:
    environment = prepare(replace(CONFIG, port=free_port()), tmp_path, tmp_path)
    file = serves_configuration(tmp_path, 30000)
    argv = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file)]
    # Stands for Serve's actor: starts HAProxy, waits until its socket is there, tells its pid.
    watcher = (
        "import subprocess, sys, time, pathlib\n"
        f"child = subprocess.Popen({argv!r})\n"
        f"while not pathlib.Path({str(tmp_path / 'ha.sock')!r}).exists(): time.sleep(0.02)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", watcher], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    descriptor = os.pidfd_open(child) if Path(f"/proc/{child}").exists() else None

    if descriptor is not None:
        ended, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
        assert ended
