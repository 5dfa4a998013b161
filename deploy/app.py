"""The composition root: prefill, decode and gateway as one Ray Serve application.

Plain classes become deployments here and nowhere else. A deployment's configuration is visible to whoever
reads the cluster's state: secrets are read inside the gateway's replica, from a private file.
"""

import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from ray import serve
from ray.serve.config import BackpressureConfig, RequestRouterConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.cluster_environment import SERVE_ENVIRONMENT
from deploy.config import SystemConfig, TracingConfig
from deploy.logs import log_to_file
from deploy.membership import of_this_system
from deploy.serve_listener import bind_internal_server
from deploy.serve_shutdown import when_told_to_stop
from deploy.state import read_private
from deploy.tracing import Process, ProcessTracing, start_tracing
from gateway.config import GatewayConfig, GatewaySecrets, ModelFacts
from gateway.errors import RETRY_AFTER_S
from gateway.ingress import GatewayReplica
from gateway.routing.pressure import Marks
from gateway.telemetry import Telemetry as GatewayTelemetry
from workers.api import Phase
from workers.pools.config import ReplicaConfig
from workers.pools.decode import DecodeReplica
from workers.pools.prefill import PrefillReplica
from workers.pools.replica import QUEUE_FACTOR, real_parts
from workers.profile.fingerprint import contract_of
from workers.profile.model_folder import ModelFolderError
from workers.profile.schema import ModelProfile, dump_profile, parse_profile
from workers.profile.vllm_args import KEEP_LOGGING, Device, engine_environment
from workers.telemetry import Telemetry

APP_NAME: Final = "phasegate"
PREFILL: Final = "Prefill"
DECODE: Final = "Decode"
DENSE: Final = "DenseDecode"
"""Decode's second pool, where the profile has one."""
GATEWAY: Final = "Gateway"

MARGIN: Final = 16
"""Status, attach and refetch calls that a replica takes while it is full of requests."""
CUT_MARGIN_S: Final = 5.0
"""From the last words to requests in flight, when their time is over, until Serve kills the replica."""
HEALTH_CHECK_PERIOD_S: Final = 1.0
"""Serve notices a dead replica at the next check, and a dead engine in a live one at the third that fails."""
HEALTH_CHECK_TIMEOUT_S: Final = 30.0
COLLECT_EVERY: Final = 20_000
"""New objects between two searches for cycles. A token leaves none; at Python's 700 the searches take 3 % of
a replica's time under load."""
LOGICAL_CPUS: Final = 0.1
"""Cores are shared: what a replica may use is set by its threads, not by Ray's accounting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be served, from where."""

    config: SystemConfig
    profile: ModelProfile
    model_dirs: Mapping[Phase, Path]
    """Of each phase's weights. The gateway takes tokenizer and template from prefill's."""
    gateway_secrets: Path
    """A private file with `state_url` and `pepper` (hexadecimal)."""
    logs: Path
    """Each replica writes a file of its own here."""
    device: Device = "cpu"

    @property
    def of_dense(self) -> "Plan":
        """As the engines of decode's second pool see it."""
        return replace(self, profile=self.profile.densest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What every replica needs to be watched: where it writes, and for which requests it traces."""

    logs: str
    tracing: TracingConfig

    def begin(self, process: Process) -> ProcessTracing:
        """Call it first: from now on this replica's log lines go to a file of its own."""
        gc.set_threshold(COLLECT_EVERY)
        logs = Path(self.logs)
        log_to_file(logs / f"{process}-{_replica_id()}.log")
        return start_tracing(self.tracing, process, _replica_id(), logs)

    @staticmethod
    def ready() -> None:
        """Call it last: what is here stays, and later searches for cycles need not go through it."""
        gc.collect()
        gc.freeze()


class PrefillDeployment(PrefillReplica):
    async def __init__(self, config: ReplicaConfig, watch: Watch) -> None:  # type: ignore[misc]
        self._tracing = watch.begin("prefill")
        bind_internal_server(config.host)
        telemetry = Telemetry(self._tracing.tracer)
        super().__init__(
            config, real_parts(config, Phase.PREFILL, _replica_id(), telemetry, of_this_system())
        )
        await self.start()
        watch.ready()
        when_told_to_stop(partial(self.drain, config.shutdown_grace_s))

    async def __del__(self) -> None:
        await self.stop()
        await self._tracing.close()


class DecodeDeployment(DecodeReplica):
    async def __init__(self, config: ReplicaConfig, watch: Watch) -> None:  # type: ignore[misc]
        self._tracing = watch.begin("decode")
        bind_internal_server(config.host)
        telemetry = Telemetry(self._tracing.tracer)
        super().__init__(config, real_parts(config, Phase.DECODE, _replica_id(), telemetry, of_this_system()))
        await self.start()
        watch.ready()
        when_told_to_stop(partial(self.drain, config.shutdown_grace_s))

    async def __del__(self) -> None:
        await self.stop()
        await self._tracing.close()


class GatewayDeployment(GatewayReplica):
    async def __init__(  # type: ignore[misc]
        self,
        config: GatewayConfig,
        secrets_file: str,
        watch: Watch,
        prefill: Any,
        *decode: Any,
        profile: Mapping[str, Any],
    ) -> None:
        """`decode`: one for each pool. `profile`: as `dump_profile` gives it."""
        self._tracing = watch.begin("gateway")
        bind_internal_server(config.host)
        secrets = read_gateway_secrets(Path(secrets_file))
        telemetry = GatewayTelemetry(self._tracing.tracer)
        read_contract = partial(
            contract_of, parse_profile(profile, source="gateway"), Path(config.model.model_dir)
        )
        contract = read_contract()
        super().__init__(
            config,
            secrets,
            prefill,
            *decode,
            membership=of_this_system(),
            contract=contract,
            telemetry=telemetry,
        )
        if changed := contract.change(read_contract(), meanwhile="reading it"):
            raise ModelFolderError(changed)
        await self.start()
        watch.ready()
        # Serve sends it nothing new then: refusing what is already on its way would help nobody.
        when_told_to_stop(partial(self.drain, config.shutdown_grace_s, refuse_new=False))

    def __serve_build_asgi_app__(self) -> Any:
        return AsgiApp(self.asgi)

    async def __del__(self) -> None:
        await self.close()
        await self._tracing.close()


class AsgiApp:
    """Serve looks at `__call__` to tell ASGI 3 from ASGI 2, and insists on the lifespan protocol."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        for moment in ("startup", "shutdown"):  # the deployment starts and closes its gateway itself
            await receive()
            await send({"type": f"lifespan.{moment}.complete"})


def _replica_id() -> str:
    replica_id: str = serve.get_replica_context().replica_id.unique_id
    return replica_id


def read_gateway_secrets(path: Path) -> GatewaySecrets:
    """Raises `StateError` when the file is missing or not private."""
    raw = read_private(path)
    return GatewaySecrets(state_url=raw["state_url"], pepper=bytes.fromhex(raw["pepper"]))


def build(plan: Plan) -> Any:
    """The Serve application, ready for `serve.run`."""
    decode_class: type[Any] = DecodeDeployment
    gateway_class: type[Any] = GatewayDeployment
    if plan.config.testing.handle_arm:
        from deploy.bench import BothWaysDecode, BothWaysGateway

        decode_class, gateway_class = BothWaysDecode, BothWaysGateway
    prefill = _pool(PREFILL, PrefillDeployment, plan, Phase.PREFILL)
    decode = [_pool(DECODE, decode_class, plan, Phase.DECODE)]
    if plan.profile.dense is not None:
        decode.append(_pool(DENSE, decode_class, plan.of_dense, Phase.DECODE))
    gateway = serve.deployment(
        name=GATEWAY,
        num_replicas=1,
        max_ongoing_requests=plan.config.limits.max_in_flight + MARGIN,
        max_queued_requests=_gateway_queue(plan.config),
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_S),
        ray_actor_options=_actor_options(gateway_environment()),
        graceful_shutdown_timeout_s=plan.config.limits.shutdown_grace_s + CUT_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_constructor_retry_count=1,
    )(serve.ingress()(gateway_class))
    return gateway.bind(
        gateway_config(plan),
        str(plan.gateway_secrets),
        _watch(plan),
        prefill,
        *decode,
        profile=dump_profile(plan.profile),
    )


def _gateway_queue(config: SystemConfig) -> int:
    """Serve's own proxy counts a request as waiting until a replica has taken it, also in a burst for which
    there is room: the burst must not be refused for that."""
    limits = config.limits
    return limits.max_queued + (limits.max_in_flight if config.ingress == "proxy" else 0)


def _pool(name: str, cls: type[Any], plan: Plan, phase: Phase) -> Any:
    part = plan.profile.phase(phase)
    deployment = serve.deployment(
        name=name,
        num_replicas=part.replicas,
        # A pinned call waits in silence at a full replica: the replica itself refuses before that.
        max_ongoing_requests=part.max_sequences * (QUEUE_FACTOR + 1) + MARGIN,
        # A burst of all that a gateway has in flight passes through its router; more never waits there.
        max_queued_requests=plan.config.limits.max_in_flight + MARGIN,
        ray_actor_options=_actor_options(
            engine_environment(plan.profile, phase, plan.device, internal_host(plan))
        ),
        graceful_shutdown_timeout_s=plan.config.limits.shutdown_grace_s + CUT_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_constructor_retry_count=1,
        request_router_config=RequestRouterConfig(request_router_class="gateway.routing.pinned:PinnedRouter"),
    )(cls)
    return deployment.bind(replica_config(plan, phase), _watch(plan))


def _watch(plan: Plan) -> Watch:
    return Watch(logs=str(plan.logs), tracing=plan.config.tracing)


def _actor_options(environment: dict[str, str]) -> dict[str, Any]:
    return {
        "num_cpus": LOGICAL_CPUS,
        "runtime_env": {"env_vars": {**environment, **SERVE_ENVIRONMENT}},
    }


def internal_host(_: Plan) -> str:
    """Where engines and the token bus listen: one machine, so loopback."""
    return "127.0.0.1"


def replica_config(plan: Plan, phase: Phase) -> ReplicaConfig:
    testing = {
        name: value
        for name, value in asdict(plan.config.testing).items()
        if value is not None and name != "handle_arm"
    }
    mode: Literal["dev", "production"] = plan.config.mode
    return ReplicaConfig(
        profile=dump_profile(plan.profile),
        model_dir=str(plan.model_dirs[phase]),
        host=internal_host(plan),
        device=plan.device,
        logs=str(plan.logs),
        mode=mode,
        testing=testing,
        shutdown_grace_s=plan.config.limits.shutdown_grace_s,
    )


def gateway_config(plan: Plan) -> GatewayConfig:
    limits = plan.config.limits
    return GatewayConfig(
        model=ModelFacts(
            id=plan.profile.model_id,
            aliases=plan.profile.aliases,
            model_dir=str(plan.model_dirs[Phase.PREFILL]),
            context_length=plan.profile.context_length,
            block_size=plan.profile.block_size,
        ),
        host=internal_host(plan),
        mode=plan.config.mode,
        max_body_bytes=limits.max_body_bytes,
        body_timeout_s=limits.body_timeout_s,
        max_in_flight=limits.max_in_flight,
        request_timeout_s=limits.request_timeout_s,
        silence_s=limits.silence_s,
        shutdown_grace_s=limits.shutdown_grace_s,
        proxy_labels=True,
        marks=Marks(above=plan.profile.dense_above, below=plan.profile.dense_below),
        holds=plan.config.testing.holds,
    )


def gateway_environment() -> dict[str, str]:
    """The gateway imports vLLM for its renderer and parsers; it computes nothing with it."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **KEEP_LOGGING,
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
