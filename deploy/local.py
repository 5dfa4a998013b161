"""Local mode: the whole system on one machine, under one supervisor.

Everything is started in order, each wait has a bound and says what it waits for, and whatever happens
(a signal at any moment, a failing part) ends with everything stopped and nothing left behind.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from deploy import ingress, model_store, preflight, tenants, watch
from deploy.cluster_environment import driver_environment, make_token
from deploy.config import SystemConfig
from deploy.control import ControlServer, Internal, ServeFleet, stop_self
from deploy.haproxy_log import HaproxyLog
from deploy.internal import InternalPortError, listen
from deploy.logs import keep_bounded
from deploy.processes import MARKER, end_marked
from deploy.production import is_loopback
from deploy.redis_server import RedisServer, start_redis
from deploy.signals import StopRequested, StopSwitch, deaf_children
from deploy.state import (
    Runtime,
    Secrets,
    StateDir,
    StateLock,
    clear_runtime,
    load_or_create_secrets,
    make_runtime,
    write_private,
)
from deploy.trace_files import prune
from deploy.watch import PartLost, RedisKeeper
from deploy.yaml_file import told
from workers.api import Phase
from workers.profile.schema import ModelProfile

APPLICATION_TIMEOUT_S: Final = 300.0
READY_TIMEOUT_S: Final = 60.0
TIDY_EVERY_S: Final = 30.0
REMIND_EVERY_S: Final = 15.0

Say = Callable[[str], None]
log = logging.getLogger(__name__)


class StartError(Exception):
    """The system did not start. The message says which part, and what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    base_url: str
    account_id: str
    api_key: str
    models: tuple[str, ...]


class Supervisor:
    """Owns everything that runs for one state folder, from `run` to its return."""

    def __init__(
        self,
        state: StateDir,
        config: SystemConfig,
        cache: Path,
        *,
        say: Say,
        progress: model_store.Progress = model_store.no_progress,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._config = config
        self._cache = cache
        self._say = say
        self._progress = progress
        self._now = now
        self._switch = StopSwitch()
        self._watched: list[watch.Watched] = []
        self._core: watch.Core | None = None

    def run(self, on_ready: Callable[[Ready], None]) -> None:
        """Start, serve until told to stop, stop.

        Raises:
            StateError: another supervisor holds the state folder. Nothing was touched then.
            StartError, and the errors of the parts: it did not start. Everything is stopped again.
            StopRequested: it was told to stop before it was ready. Everything is stopped again.
        """
        os.umask(0o077)  # inherited: whatever any process of the system writes is its owner's only
        lock = StateLock(self._state)
        lock.acquire()
        self._switch.install()
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            undo.callback(clear_runtime, self._state)
            undo.callback(self._end_leftovers)
            self._end_leftovers()
            clear_runtime(self._state)
            try:
                with self._switch.interrupting():
                    self._start(undo, on_ready)
                self._watch()
            except PartLost as lost:
                log.error("part.lost what=%s", lost)
                raise StartError(str(lost)) from None
            except OSError as bad:
                raise StartError(f"{bad.strerror}: {bad.filename or 'while writing'}") from None
            finally:
                self._state.local.unlink(missing_ok=True)
                self._say("stopping")

    def _start(self, undo: contextlib.ExitStack, on_ready: Callable[[Ready], None]) -> None:
        self._check_machine()
        chosen = preflight.choose_profile(self._config.profile, self._cache)
        profile = chosen.profile
        secrets = load_or_create_secrets(self._state)
        os.environ[MARKER] = self._state.marker
        undo.callback(os.environ.pop, MARKER, None)
        with self._switch.held_back():
            runtime = make_runtime(self._state)
        prune(self._state.logs)
        # Temporary files of every process of the system go with the system.
        os.environ["TMPDIR"] = runtime.scratch
        undo.callback(os.environ.pop, "TMPDIR", None)
        control = ControlServer(
            Path(runtime.control_socket),
            stop_self,
            self._internal(),
            grace_s=self._config.limits.shutdown_grace_s,
            profile={"name": profile.name, "instead": chosen.instead},
        )
        undo.callback(control.close)
        control.start()

        if chosen.instead is not None:
            self._say(chosen.instead)
        self._say(f"model: {profile.name}")
        folders = {phase: preflight.model_dir(profile, phase, self._cache, self._progress) for phase in Phase}
        if apart := preflight.disagreement(profile, folders):
            raise StartError(f"profile {profile.name}: {apart}")
        self._switch.check()
        state_url = self._start_redis(secrets, undo)
        self._start_application(profile, folders, runtime, undo)
        control.use(partial(ServeFleet, dense=profile.dense is not None), "ready")
        undo.callback(self._drain, control)
        on_ready(self._become_ready(profile, state_url, secrets))

    def _internal(self) -> Internal | None:
        if not self._config.internal_port:
            return None
        try:
            listener = listen(self._config.internal_port)
        except InternalPortError as bad:
            raise StartError(str(bad)) from None
        make_token(self._state.internal_token)
        return Internal(listener, self._state.internal_token.read_text(), self._state.logs)

    def _check_machine(self) -> None:
        if not is_loopback(self._config.host):
            self._say(f"{self._config.host} can be reached from other machines, in clear text")
        found = preflight.problems(self._config, self._state, self._cache)
        if found:
            raise StartError(told("not started", found))

    def _start_redis(self, secrets: Secrets, undo: contextlib.ExitStack) -> str:
        """Starts the server, unless the configuration names one; returns the address to use."""
        url = self._config.redis.state_url
        if url is None:
            self._say("redis: starting")

            def start(port: int | None) -> RedisServer:
                with deaf_children():
                    return start_redis(
                        self._state.redis,
                        secrets.redis_password,
                        self._state.logs / "redis.log",
                        port=port,
                        sleep=self._pause,
                    )

            redis = RedisKeeper(start, say=self._say)
            undo.callback(redis.stop)
            self._watched.append(redis)
            url = redis.server.url
        write_private(self._state.gateway_secrets, {"state_url": url, "pepper": secrets.pepper})
        return url

    def _start_application(
        self,
        profile: ModelProfile,
        folders: Mapping[Phase, Path],
        runtime: Runtime,
        undo: contextlib.ExitStack,
    ) -> None:
        make_token(self._state.ray_token)
        scratch = Path(runtime.scratch)
        os.environ.update(driver_environment(self._state.ray_token))
        os.environ.update(ingress.prepare(self._config, scratch, self._state.logs))
        if self._config.ingress == "haproxy":
            haproxy_log = HaproxyLog(scratch / ingress.LOG_SOCKET)
            undo.callback(haproxy_log.close)
            haproxy_log.start()
        from deploy import app, cluster

        self._say("ray: starting")
        undo.callback(cluster.keep_logs, scratch, self._state.logs)
        undo.callback(cluster.stop, self._say, self._cluster_answers)
        try:
            with deaf_children():
                cluster.start_ray(scratch, self._config.dashboard)
            self._core = watch.Core.of_this_process()
            self._watched.append(self._core)
            cluster.start_serve(self._config)
        except PartLost:
            raise
        except Exception as bad:
            log.exception("ray.start.failed")
            raise StartError(f"Ray did not start: {bad}") from None
        self._switch.install()  # Ray has set handlers of its own
        self._switch.check()
        plan = app.Plan(
            config=self._config,
            profile=profile,
            model_dirs=folders,
            gateway_secrets=self._state.gateway_secrets,
            logs=self._state.logs,
        )
        cluster.deploy(app.build(plan))
        self._await_application()

    def _drain(self, control: ControlServer) -> None:
        for account in control.drain() if self._cluster_answers() else ():
            if account["cut"]:
                self._say(f"{account['cut']} of {account['found']} requests in flight were cut")

    def _await_application(self) -> None:
        from deploy import cluster

        started = self._now()
        told: frozenset[str] | None = None
        told_at = started
        while True:
            try:
                running, waiting = cluster.progress()
            except cluster.ClusterError as bad:
                raise StartError(f"the application did not start:\n{bad}") from None
            if running:
                return
            now = self._now()
            names = ", ".join(sorted(waiting)) or "Serve"
            if now - started > APPLICATION_TIMEOUT_S:
                raise StartError(f"{names} not ready after {APPLICATION_TIMEOUT_S:.0f} s")
            if waiting != told or now - told_at > REMIND_EVERY_S:
                so_far = "" if told is None else f" ({now - started:.0f} s so far)"
                self._say(f"waiting for {names}{so_far}")
                told, told_at = waiting, now
            self._look()
            self._pause(0.25)

    def _become_ready(self, profile: ModelProfile, state_url: str, secrets: Secrets) -> Ready:
        base_url = f"http://{self._config.authority}"
        self._say("waiting for engines to join the gateway")
        deadline = self._now() + READY_TIMEOUT_S
        answer = "no answer"
        while True:
            try:
                response = httpx.get(f"{base_url}/readyz", timeout=5, trust_env=False)
                if response.status_code == 200:
                    break
                answer = f"HTTP {response.status_code}"
            except httpx.HTTPError as bad:
                answer = type(bad).__name__
            if self._now() > deadline:
                raise StartError(f"{base_url}/readyz is not ready after {READY_TIMEOUT_S:.0f} s: {answer}")
            self._look()
            self._pause(0.2)
        owner = tenants.first_key(state_url, secrets.pepper, self._state)
        ready = Ready(
            base_url=base_url,
            account_id=owner.account_id,
            api_key=owner.api_key,
            models=(profile.model_id, *profile.aliases),
        )
        write_private(
            self._state.local,
            {
                "base_url": ready.base_url,
                "account_id": ready.account_id,
                "api_key": ready.api_key,
                "models": list(ready.models),
            },
        )
        return ready

    def _watch(self) -> None:
        """Returns when the switch is thrown.

        Raises:
            PartLost: something is gone without which nothing can go on.
        """
        tidied = self._now()
        with contextlib.suppress(StopRequested):
            while not self._switch.wait(watch.EVERY_S):
                self._look()
                if self._now() - tidied > TIDY_EVERY_S:
                    keep_bounded(self._state.logs)
                    tidied = self._now()

    def _cluster_answers(self) -> bool:
        return self._core is not None and self._core.complete

    def _look(self) -> None:
        for part in self._watched:
            part.look()

    def _pause(self, seconds: float) -> None:
        """Sleeps, unless somebody wants the system to stop."""
        if self._switch.wait(seconds):
            raise StopRequested

    def _end_leftovers(self) -> None:
        ended = end_marked(self._state.marker)
        if ended:
            log.warning("ended processes left over: %s", ended)
