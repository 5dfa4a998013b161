"""A real HAProxy before any HTTP server, configured as in the running system, without Ray's cluster."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from deploy.config import SystemConfig
from deploy.ingress import prepare


def serves_configuration(folder: Path, *ports: int) -> Path:
    """What Ray Serve itself writes for one application with gateways on these ports of loopback."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    servers = [ServerConfig(name=f"gateway-{port}", host="127.0.0.1", port=port) for port in ports]
    fallback = ServerConfig(name="SERVE_PROXY_ACTOR-1", host="127.0.0.1", port=1)
    backend = BackendConfig(
        name="http-phasegate",
        path_prefix="/",
        servers=servers,
        app_name="phasegate",
        fallback_server=fallback,
    )
    file = folder / "haproxy.cfg"
    api = HAProxyApi(
        cfg=HAProxyConfig(
            http_options=HTTPOptions(host="127.0.0.1", port=1),
            socket_path=str(folder / "ha.sock"),
            server_state_base=str(folder),
            server_state_file=str(folder / "server-state"),
            has_received_routes=True,
            has_received_servers=bool(ports),
        ),
        backend_configs={"http-phasegate": backend} if ports else {},
        config_file_path=str(file),
    )
    api._generate_config_file_internal()
    return file


@asynccontextmanager
async def running_haproxy(config: SystemConfig, folder: Path, *ports: int) -> AsyncIterator[str]:
    """Its URL. The program is the one that Serve is told to run."""
    environment = prepare(config, folder, folder)
    file = serves_configuration(folder, *ports)
    argv = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(file), "-dR"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=sys.stderr, stderr=subprocess.STDOUT)
    try:
        await _answers(config.host, config.port, process)
        yield f"http://{config.authority}"
    finally:
        process.kill()
        await process.wait()


async def _answers(host: str, port: int, process: asyncio.subprocess.Process) -> None:
    for _ in range(200):
        assert process.returncode is None, f"HAProxy ended with {process.returncode}"
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise AssertionError("HAProxy does not listen")
