"""Nobody without a key is served anything, on any port, and nothing breaks when somebody tries."""

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import grpc
import httpx
import psutil
import pytest

from tests.support import probes
from tests.support.stack import Stack, eventually, processes_of

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

T = TypeVar("T")


@pytest.fixture(scope="module")
def ports(stack: Stack) -> list[probes.Listener]:
    supervisor = json.loads((stack.state / "runtime.json").read_text())["pid"]
    found = probes.listeners([*processes_of(stack.state), psutil.Process(supervisor)])
    assert len(found) > 10, "Redis, Ray, Serve, engines, the bus: there are more than these"
    return found


def knock(ports: list[probes.Listener], try_: Callable[[int], T]) -> dict[str, T]:
    """What `try_` says of each port, by a name for people."""
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda listener: try_(listener.port), ports)
    return {f"{port.port} {port.process}": answer for port, answer in zip(ports, answers, strict=True)}


@pytest.mark.timeout(120)
def test_without_a_key_every_port_refuses_or_ignores(
    stack: Stack, ports: list[probes.Listener], client: httpx.Client
) -> None:
    before = {process.pid for process in processes_of(stack.state)}

    served = {}
    for name, data in probes.RAW.items():
        answers = knock(ports, lambda port, data=data: probes.raw_answer(port, data))
        served |= {
            f"{name}: {port}": answer[:80] for port, answer in answers.items() if probes.lets_in(answer)
        }
    assert served == {}
    strangers = knock(ports, probes.answers_a_stranger)
    assert [port for port, answered in strangers.items() if answered] == []

    assert {process.pid for process in processes_of(stack.state)} == before, "a process died, or was born"
    ask = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert client.post(stack.run_url, json=ask).status_code == 200
    eventually(lambda: stack.control("/status").json(), lambda _: stack.idle())


@pytest.mark.timeout(120)
def test_rays_and_serves_servers_want_the_clusters_token(stack: Stack, ports: list[probes.Listener]) -> None:
    refusing: dict[str, set[int]] = {}
    for method in probes.GRPC_METHODS:
        for token in (None, "0" * 64):
            codes = knock(ports, lambda port, m=method, t=token: probes.grpc_code(port, m, t))
            assert {port for port, code in codes.items() if not probes.kept_out(code)} == set(), method
            refusing.setdefault(method, set()).update(
                int(port.split()[0])
                for port, code in codes.items()
                if code is grpc.StatusCode.UNAUTHENTICATED
            )

    assert all(refusing.values()), "each method was tried where it exists"
    token = (stack.state / "ray-token").read_text()
    store = probes.GRPC_METHODS[0]
    answered = [port for port in refusing[store] if probes.grpc_code(port, store, token) is None]
    assert answered, "with the token the control service answers: the refusals mean something"


def test_on_any_other_address_nobody_listens(ports: list[probes.Listener]) -> None:
    reached = []
    for address in sorted(probes.other_addresses()):
        for listener in ports:
            try:
                socket.create_connection((address, listener.port), timeout=0.5).close()
                reached.append((address, listener))
            except OSError:
                continue

    assert reached == []
