"""The long form, once with each ingress: the list of checks, crowds of connections, and parts that die."""

import asyncio
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.e2e.test_http_list import surface_of
from tests.support.stack import ROOT, Stack, cli, eventually, processes_of, running_stack
from tests.support.surface import LIMITS, Surface, nothing_is_held
from tests.support.surface_checks import CHECKS

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(600)]

CROWD = 10_000
JOINING = 50
"""At once. A client has its answer before Serve counts the request as over: few enough that a slow machine's
overlap of several groups stays within what a gateway takes."""
SILENT = 2_000
STALLED = 20
STALLED_BYTES = 64 * 1024**2
"""Far less than twenty answers of eight thousand tokens each would need in every buffer on their way."""
SPARE_DESCRIPTORS = 40
ODD_ANSWERS = {"gateway_lost", "gateway_unavailable", "engines_unavailable", "shutting_down"}


@pytest.fixture(scope="module", params=["haproxy", "proxy"])
def system(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_dir: object
) -> Iterator[Stack]:
    """With scripted engines that are ten times as fast as a GPU: what is tested is in front of them."""
    folder = tmp_path_factory.mktemp("http")
    profile = yaml.safe_load((ROOT / "deploy/models/scripted.yaml").read_text())
    profile["decode"]["script"]["base_ms"] = 2
    file = folder / "quick.yaml"
    file.write_text(yaml.safe_dump(profile))
    config = {"ingress": request.param, "limits": LIMITS}
    with running_stack(folder, profile=str(file), config=config) as stack:
        yield stack


@pytest.fixture
def surface(system: Stack) -> Surface:
    return surface_of(system)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_surface(surface: Surface, check: Callable[[Surface], None]) -> None:
    check(surface)

    nothing_is_held(surface)


@contextmanager
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors(system: Stack) -> int:
    return sum(process.num_fds() for process in processes_of(system.state))


def test_ten_thousand_idle_connections_hinder_nobody_and_leave_nothing(
    system: Stack, surface: Surface
) -> None:
    before = descriptors(system)
    with many_files():
        if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < CROWD + 1000:
            pytest.skip(f"this machine allows fewer than {CROWD} open files")
        asyncio.run(crowd(system, surface, before))

    eventually(
        lambda: descriptors(system), lambda now: now < before + SPARE_DESCRIPTORS, within_s=60, what="return"
    )


async def crowd(system: Stack, surface: Surface, before: int) -> None:
    """Each connection has had an answer and waits for its next request."""
    request = surface.head(method="GET", path="/healthz")
    opened: list[asyncio.StreamWriter] = []

    async def join() -> None:
        reader, writer = await asyncio.open_connection(*surface.address)
        opened.append(writer)
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head

    for _ in range(CROWD // JOINING):
        await asyncio.gather(*(join() for _ in range(JOINING)))
    held = await asyncio.to_thread(descriptors, system)
    assert held > before + CROWD * 0.9, "the connections were not kept"
    answer = await asyncio.to_thread(
        httpx.post,
        f"{surface.base_url}{surface.run_path}",
        json={"prompt": "Hello", "max_tokens": 5},
        headers=surface.headers,
        timeout=30,
    )
    assert answer.status_code == 200
    for writer in opened:
        writer.close()


def test_connections_that_say_nothing_are_ended_all_at_once(system: Stack, surface: Surface) -> None:
    before = descriptors(system)
    with many_files(), ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection(surface.address))
        with surface.client() as client:
            assert client.get("/healthz").status_code == 200
        eventually(
            lambda: descriptors(system),
            lambda now: now < before + SPARE_DESCRIPTORS,
            within_s=10 * LIMITS["header_timeout_s"],
            what="return of descriptors while the clients still hold on",
        )


def test_twenty_clients_that_do_not_read_cost_little_memory(system: Stack, surface: Surface) -> None:
    ask = {"model": surface.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    body = json.dumps(ask | {"max_tokens": surface.flood}).encode()
    before = front_memory(system)
    with ExitStack() as stack:
        for _ in range(STALLED):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(surface.address)
            length = f"content-length: {len(body)}"
            connection.sendall(surface.head(length, path="/v1/chat/completions") + body)
        eventually(surface.held, bool, what="request at work")
        most = before
        end = time.monotonic() + 240
        while surface.held():
            assert time.monotonic() < end, "they were not ended"
            most = max(most, front_memory(system))
            time.sleep(0.2)
    assert most - before < STALLED_BYTES


def front_memory(system: Stack) -> int:
    """Bytes of the gateway and of what stands before it."""
    names = ("haproxy", "ray::ProxyActor", "ray::ServeReplica:phasegate:Gateway")
    return sum(
        p.memory_info().rss for p in processes_of(system.state) if p.name() in names or named(p, names)
    )


def named(process: psutil.Process, names: tuple[str, ...]) -> bool:
    return any(word.startswith(names) for word in process.cmdline()[:1])


def test_a_gateway_that_is_killed_is_replaced_and_clients_get_our_errors_meanwhile(
    system: Stack, surface: Surface
) -> None:
    (gateway,) = system.status()["gateways"]
    os.kill(gateway["pid"], signal.SIGKILL)

    end = time.monotonic() + 120
    seen: list[Any] = []
    while time.monotonic() < end:
        try:
            answer = httpx.get(f"{surface.base_url}/readyz", timeout=60)
        except httpx.TransportError as cut:
            seen.append(type(cut).__name__)
        else:
            if answer.status_code == 200 and len(seen) > 0:
                break
            if answer.status_code != 200 and "error" in answer.json():
                assert answer.json()["error"]["code"] in ODD_ANSWERS, answer.text
                assert answer.headers["x-request-id"] == answer.headers["cf-ai-req-id"]
                assert answer.status_code != 503 or int(answer.headers["retry-after"]) > 0
            seen.append(answer.status_code)
        time.sleep(0.1)
    assert answer.status_code == 200, seen
    assert [found for found in seen if isinstance(found, str)] == [], seen
    with surface.client() as client:
        assert client.post(surface.run_path, json={"prompt": "Hello", "max_tokens": 2}).status_code == 200
    assert system.status()["gateways"][0]["pid"] != gateway["pid"]


def test_a_balancer_that_is_killed_is_replaced(system: Stack, surface: Surface) -> None:
    running = [process for process in processes_of(system.state) if process.name() == "haproxy"]
    if not running:
        pytest.skip("the plain proxy runs")
    for process in running:
        process.kill()

    def answers() -> int | str:
        try:
            return httpx.get(f"{surface.base_url}/readyz", timeout=10).status_code
        except httpx.TransportError as gone:
            return type(gone).__name__

    eventually(answers, lambda got: got == 200, within_s=120, what="HAProxy")


def test_nothing_is_left_when_the_supervisor_is_killed(system: Stack, surface: Surface) -> None:
    """Last: the system is gone afterwards."""
    runtime = json.loads((system.state / "runtime.json").read_text())
    os.kill(runtime["pid"], signal.SIGKILL)

    ended = cli("down", "--state", str(system.state), timeout_s=120)

    assert ended.returncode == 0, ended.stderr
    assert processes_of(system.state) == []
    assert not Path(runtime["scratch"]).exists()
    with socket.socket() as probe:
        assert probe.connect_ex(surface.address) != 0
