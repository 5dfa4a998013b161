"""The supervisor's control surface: HTTP over a unix socket in the private state folder.

GET  /status          what `phasegate status --json` prints
GET  /requests/{id}   figures of one finished request
GET  /ledgers         who has which page, of every replica or of `?replica=ID`
POST /stop            begin to stop; answers at once
"""

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deploy.internal import internal_app
from deploy.metrics_page import ProcessPage
from kv_transfer.api import LedgerSnapshot
from workers.api import Phase, ReplicaStatus

ANSWER_TIMEOUT_S: Final = 5.0
"""A replica that does not answer in time is left out of the status."""
DRAIN_MARGIN_S: Final = 5.0
"""For the last words to requests in flight, beyond their grace."""
START_TIMEOUT_S: Final = 10.0

log = logging.getLogger(__name__)


class ControlError(Exception):
    """The supervisor does not answer, or answers that it cannot."""


class Fleet(Protocol):
    """What the control surface asks. Called in the control surface's own event loop only."""

    async def replicas(self) -> list[ReplicaStatus]: ...

    async def gateways(self) -> list[dict[str, Any]]: ...

    async def request(self, request_id: str) -> dict[str, Any] | None: ...

    async def drain(self, grace_s: float) -> list[dict[str, int]]:
        """Let requests finish for so long, take no new ones, end what is left. One account per gateway."""

    async def metrics(self) -> list[ProcessPage]: ...

    async def ledgers(self, only: str | None) -> dict[str, LedgerSnapshot]:
        """By replica, of those that answer.

        Args:
            only: this replica; None: all.
        """


class NoFleet:
    """Before there is one."""

    async def replicas(self) -> list[ReplicaStatus]:
        return []

    async def gateways(self) -> list[dict[str, Any]]:
        return []

    async def request(self, request_id: str) -> dict[str, Any] | None:
        return None

    async def drain(self, grace_s: float) -> list[dict[str, int]]:
        return []

    async def metrics(self) -> list[ProcessPage]:
        return []

    async def ledgers(self, only: str | None) -> dict[str, LedgerSnapshot]:
        return {}


class ServeFleet:
    """The running application, asked through Serve handles. Make it in the loop that will use it."""

    def __init__(self, *, dense: bool) -> None:
        """`dense`: decode has a second pool."""
        from ray import serve

        from deploy.app import APP_NAME, DECODE, DENSE, GATEWAY, PREFILL
        from gateway.dispatch.pools import ServePool

        names = (PREFILL, DECODE, DENSE) if dense else (PREFILL, DECODE)
        self._pool = ServePool(*(serve.get_deployment_handle(name, APP_NAME) for name in names))
        self._gateways = serve.get_deployment_handle(GATEWAY, APP_NAME)

    async def replicas(self) -> list[ReplicaStatus]:
        asked = [(phase, replica) for phase in Phase for replica in self._pool.replicas(phase)]
        answers = await asyncio.gather(*(self._status(phase, replica) for phase, replica in asked))
        return [answer for answer in answers if answer is not None]

    async def _status(self, phase: Phase, replica: str) -> ReplicaStatus | None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._pool.status(phase, replica)
        except TimeoutError:
            log.warning("replica %s does not answer", replica)
            return None
        return answer if isinstance(answer, ReplicaStatus) else None

    async def ledgers(self, only: str | None) -> dict[str, LedgerSnapshot]:
        asked = [
            (phase, replica)
            for phase in Phase
            for replica in self._pool.replicas(phase)
            if only in {None, replica}
        ]
        answers = await asyncio.gather(*(self._ledger(phase, replica) for phase, replica in asked))
        return {r: found for (_, r), found in zip(asked, answers, strict=True) if found is not None}

    async def _ledger(self, phase: Phase, replica: str) -> LedgerSnapshot | None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._pool.ledger(phase, replica)
        except TimeoutError:
            log.warning("replica %s does not answer for its ledger", replica)
            return None
        return answer if isinstance(answer, LedgerSnapshot) else None

    async def gateways(self) -> list[dict[str, Any]]:
        return await self._broadcast("status")

    async def request(self, request_id: str) -> dict[str, Any] | None:
        found = await self._broadcast("request_summary", request_id)
        return next((summary for summary in found if summary is not None), None)

    async def drain(self, grace_s: float) -> list[dict[str, int]]:
        return await self._broadcast("drain", grace_s, within_s=grace_s + DRAIN_MARGIN_S)

    async def metrics(self) -> list[ProcessPage]:
        asked = [(phase, replica) for phase in Phase for replica in self._pool.replicas(phase)]
        gateways, *engines = await asyncio.gather(
            self._broadcast("metrics"), *(self._page(phase, replica) for phase, replica in asked)
        )
        return [
            *(ProcessPage(process="gateway", replica=name, text=page.decode()) for name, page in gateways),
            *engines,
        ]

    async def _page(self, phase: Phase, replica: str) -> ProcessPage:
        text: str | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._pool.metrics(phase, replica)
            text = answer.decode() if isinstance(answer, bytes) else None
        return ProcessPage(process=phase.value, replica=replica, text=text)

    async def _broadcast(
        self, method: str, *args: str | float, within_s: float = ANSWER_TIMEOUT_S
    ) -> list[Any]:
        """Answers of the gateways that gave one in time."""
        try:
            async with asyncio.timeout(within_s):
                results = await self._gateways.broadcast(method, *args).results_async(return_exceptions=True)
        except TimeoutError:
            return []
        return [result for result in results if not isinstance(result, BaseException)]


@dataclass(frozen=True, slots=True)
class Internal:
    """A second listener, served beside the socket: see `deploy/internal.py`."""

    listener: socket.socket
    """Bound; closed with the server."""
    token: str = field(repr=False)
    logs: Path


class ControlServer:
    """Runs in a thread of its own, so that it answers while the supervisor starts, waits and stops."""

    def __init__(
        self,
        path: Path,
        stop: Callable[[], None],
        internal: Internal | None = None,
        *,
        grace_s: float = 0.0,
        profile: Mapping[str, str | None] | None = None,
    ) -> None:
        """
        Args:
            grace_s: how long requests in flight may go on after a stop, for who waits for its end.
            profile: the one that runs, as the status tells it: its `name`, and in `instead` why it is not
                the one that was asked for.
        """
        self._path = path
        self._profile = profile
        self._grace_s = grace_s
        self._stop = stop
        self._internal = internal
        self._fleet: Fleet = NoFleet()
        self._phase = "starting"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._servers: list[tuple[Any, socket.socket]] = []
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._started = threading.Event()

    def start(self) -> None:
        """Returns when the socket answers.

        Raises:
            ControlError: it does not.
        """
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or not self._servers:
            raise ControlError(f"cannot listen on {self._path}")

    def use(self, make: Callable[[], Fleet], phase: str, *, within_s: float = START_TIMEOUT_S) -> None:
        """From now on answer from the fleet that `make` gives: called in the server's event loop.

        Raises:
            ControlError: `make` took too long.
        """
        assert self._loop is not None

        async def switch() -> None:
            self._fleet, self._phase = make(), phase

        try:
            asyncio.run_coroutine_threadsafe(switch(), self._loop).result(within_s)
        except TimeoutError:  # an OSError to whoever catches those, and one that says nothing
            raise ControlError(f"the application could not be asked within {within_s:g} s") from None

    def drain(self) -> list[dict[str, int]]:
        """End what is in flight: one account per gateway, requests `found` in flight and `cut`. Never raises.

        To be called before Serve's own shutdown, which begins with the ingress: that cuts streams in silence.
        """
        assert self._loop is not None
        work = asyncio.run_coroutine_threadsafe(self._fleet.drain(self._grace_s), self._loop)
        try:
            return work.result(self._grace_s + 2 * DRAIN_MARGIN_S)
        except Exception:
            log.exception("gateways.drain.failed")
            return []

    def close(self) -> None:
        """Idempotent. Ends requests in progress."""
        if self._servers and self._thread.is_alive():
            for server, _ in self._servers:
                server.should_exit = server.force_exit = True
            self._thread.join(START_TIMEOUT_S)
        if self._internal is not None:
            self._internal.listener.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))  # its folder is private from the start, so nobody slips in
            self._path.chmod(0o600)
            listener.listen()
            self._servers = [(_server(self._app()), listener)]
            if (internal := self._internal) is not None:
                app = internal_app(lambda: self._fleet, internal.token, internal.logs)
                self._servers.append((_server(app), internal.listener))
            self._loop.call_soon(self._started.set)
            await asyncio.gather(*(server.serve(sockets=[at]) for server, at in self._servers))
        except OSError:
            log.exception("control.listen.failed path=%s", self._path)
        finally:
            listener.close()
            self._started.set()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/status", self._status),
                Route("/requests/{request_id}", self._request),
                Route("/ledgers", self._ledgers),
                Route("/stop", self._stop_route, methods=["POST"]),
            ]
        )

    async def _status(self, _: Request) -> Response:
        replicas, gateways = await asyncio.gather(self._fleet.replicas(), self._fleet.gateways())
        return JSONResponse({"profile": self._profile, **status_json(replicas, gateways)})

    async def _request(self, request: Request) -> Response:
        summary = await self._fleet.request(request.path_params["request_id"])
        return JSONResponse(summary) if summary else JSONResponse({"error": "unknown request"}, 404)

    async def _ledgers(self, request: Request) -> Response:
        only = request.query_params.get("replica")
        found = await self._fleet.ledgers(only)
        if only is not None and only not in found:
            return JSONResponse({"error": f"no replica {only} answers"}, 404)
        return JSONResponse({name: asdict(found[name]) for name in sorted(found)})

    async def _stop_route(self, _: Request) -> Response:
        self._stop()
        return JSONResponse({"pid": os.getpid(), "was": self._phase, "grace_s": self._grace_s})


def _server(app: Starlette) -> Any:
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))


def status_json(replicas: list[ReplicaStatus], gateways: list[dict[str, Any]]) -> dict[str, Any]:
    """What `phasegate status --json` prints of the parts: gauges only, sorted by id."""
    return {
        "replicas": sorted((asdict(replica) for replica in replicas), key=lambda row: row["id"]),
        "gateways": sorted(gateways, key=lambda row: row["id"]),
    }


def stop_self() -> None:
    """The same way out as a signal from outside."""
    os.kill(os.getpid(), signal.SIGTERM)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._socket_path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._socket_path)


def ask(socket_path: str, method: str, path: str, *, timeout_s: float = 15.0) -> dict[str, Any]:
    """One exchange with a supervisor.

    Raises:
        ControlError: nobody answers, or the answer is an error.
    """
    connection = _UnixConnection(socket_path, timeout_s)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException) as bad:
        raise ControlError(f"the supervisor does not answer on {socket_path}: {bad}") from None
    finally:
        connection.close()
    if answer.status != 200 or not isinstance(body, dict):
        raise ControlError(f"the supervisor refuses {path}: {body}")
    return body
