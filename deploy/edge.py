"""Puts the gateway's edge into every HTTP server that Serve starts: its proxy's, and each gateway replica's.

Serve calls `middlewares` before it starts a server (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`). For the
middleware that is a setting; for the protocol class uvicorn has none that Serve passes on, so the class that
uvicorn would choose is replaced. Another uvicorn that chooses differently is refused at start-up.
"""

import os
from pathlib import Path
from typing import Final

import msgspec
from starlette.middleware import Middleware

from deploy.config import SystemConfig
from deploy.logs import log_to_file
from gateway.edge.answers import EdgeAnswers
from gateway.edge.limits import EdgeLimits
from gateway.edge.protocol import GuardedProtocol

VARIABLE: Final = "PHASEGATE_EDGE"
"""Limits for those processes, as JSON: Serve's proxy is told nothing in any other way."""


class ServerChanged(RuntimeError):
    """This uvicorn chooses its protocol in another way: its deadlines must be looked at anew."""


class Edge(msgspec.Struct, forbid_unknown_fields=True):
    limits: EdgeLimits
    hide_routes: bool
    log: str | None
    """Of Serve's proxy; a gateway replica has its own."""


def environment(config: SystemConfig, logs: Path) -> dict[str, str]:
    limits = EdgeLimits(
        header_timeout_s=config.limits.header_timeout_s,
        client_timeout_s=config.limits.client_timeout_s,
        max_header_bytes=config.limits.max_header_bytes,
    )
    alone = config.ingress == "proxy"
    edge = Edge(limits=limits, hide_routes=alone, log=str(logs / "proxy.log") if alone else None)
    return {
        VARIABLE: msgspec.json.encode(edge).decode(),
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares",
    }


def middlewares() -> list[Middleware]:
    """Called by Serve in each process that is about to start an HTTP server.

    Raises:
        ServerChanged: there is no such place in this version of uvicorn.
    """
    edge = msgspec.json.decode(os.environ[VARIABLE], type=Edge)
    guard(edge.limits)
    if edge.log is not None:
        log_to_file(Path(edge.log))
    return [Middleware(EdgeAnswers, hide_routes=edge.hide_routes)]


def guard(limits: EdgeLimits) -> None:
    """From now on the servers of this process hold these limits."""
    from uvicorn.config import HTTP_PROTOCOLS
    from uvicorn.protocols.http import auto

    if HTTP_PROTOCOLS.get("auto") != "uvicorn.protocols.http.auto:AutoHTTPProtocol":
        raise ServerChanged(f"uvicorn chooses {HTTP_PROTOCOLS.get('auto')}")
    auto.AutoHTTPProtocol = type("Guarded", (GuardedProtocol,), {"limits": limits})
