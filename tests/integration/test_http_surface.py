"""The list of checks against a gateway with scripted engines, in the server as Serve starts it.

Once behind a real HAProxy, once alone. What the whole system adds is tested on the whole system.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy import edge
from deploy.app import AsgiApp
from deploy.config import LimitsConfig, SystemConfig
from deploy.redis_server import free_port
from tests.support.engine_pool import Script
from tests.support.gateways import ACCOUNT, KEY, MODEL, TestGateway, running_gateway
from tests.support.haproxy import running_haproxy
from tests.support.stack import eventually
from tests.support.surface import LIMITS, Surface, nothing_is_held
from tests.support.surface_checks import (
    CHECKS,
    a_body_that_drips_is_ended,
    a_connection_that_says_nothing_is_ended,
    a_refused_body_that_drips_on_is_ended,
    headers_that_drip_are_ended,
)

PATIENT = (
    a_body_that_drips_is_ended,
    a_connection_that_says_nothing_is_ended,
    a_refused_body_that_drips_on_is_ended,
    headers_that_drip_are_ended,
)
"""They take seconds each. Behind HAProxy only the whole system runs them: `tests/e2e/test_http_list.py`."""
CASES = [
    pytest.param(ingress, check, id=f"{ingress}-{check.__name__}")
    for ingress in ("haproxy", "proxy")
    for check in CHECKS
    if ingress == "proxy" or check not in PATIENT
]
CONFIG = SystemConfig(limits=LimitsConfig(**LIMITS))


@asynccontextmanager
async def served(
    gateway: TestGateway, monkeypatch: pytest.MonkeyPatch, folder: Path, *, ingress: str
) -> AsyncIterator[int]:
    """The gateway in the server that Serve starts in its proxy and in each replica; its port."""
    from ray.serve._private import http_util
    from ray.serve.config import HTTPOptions

    environment = edge.environment(replace(CONFIG, ingress=ingress), folder)
    hook = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    monkeypatch.setattr(http_util, hook, environment.pop(hook))  # Serve reads it once, at its import
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    port = free_port()
    options = HTTPOptions(host="127.0.0.1", port=port, keep_alive_timeout_s=75)
    task, server = await http_util.start_asgi_http_server(
        AsgiApp(_ServesRoutes(gateway.app)),
        http_util.configure_http_middlewares(http_util.configure_http_options_with_defaults(options)),
        event_loop=asyncio.get_running_loop(),
    )
    await asyncio.to_thread(eventually, lambda: server.started, bool, what="server")
    try:
        yield port
    finally:
        server.should_exit = True
        server.force_exit = True
        await task


class _ServesRoutes:
    """A replica answers HAProxy's health checks itself."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/-/"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
            await send({"type": "http.response.body", "body": b"success"})
            return
        await self._app(scope, receive, send)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("ingress", "check"), CASES)
async def test_surface(
    ingress: str, check: Callable[[Surface], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(answer="word " * 1600, stops=False, chunk=1, pace_s=0.002)
    async with (
        running_gateway(
            script,
            max_in_flight=64,
            context_length=9000,
            request_timeout_s=120,
            max_body_bytes=CONFIG.limits.max_body_bytes,
            body_timeout_s=CONFIG.limits.body_timeout_s,
            proxy_labels=True,
        ) as gateway,
        served(gateway, monkeypatch, tmp_path, ingress=ingress) as port,
        _front(ingress, port, tmp_path) as url,
    ):
        surface = Surface(url, ACCOUNT, KEY, MODEL, held=lambda: held(gateway))
        await asyncio.to_thread(check, surface)
        await asyncio.to_thread(nothing_is_held, surface)


@asynccontextmanager
async def _front(ingress: str, port: int, folder: Path) -> AsyncIterator[str]:
    if ingress == "proxy":
        yield f"http://127.0.0.1:{port}"
        return
    async with running_haproxy(replace(CONFIG, port=free_port()), folder, port) as url:
        yield url


def held(gateway: TestGateway) -> list[str]:
    found = {
        "slots": gateway.capacity.in_flight,
        "subscriptions": gateway.bus.subscribed,
        **gateway.pool.running,
    }
    return [f"{name}: {count}" for name, count in found.items() if count]
