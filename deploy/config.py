"""The schema of the system's configuration, and where things lie on disk.

`deploy/config_file.py` puts file and command line together; `docs/configuration.md` is generated from the
types, defaults and docstrings of this module.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan, ConfigDict, TypeAdapter, ValidationError

from deploy.yaml_file import ConfigError, Mistake, told

STRICT: ConfigDict = {"extra": "forbid", "strict": True}
PROFILE_DEFAULT = "smollm2-135m"
PORT_DEFAULT = 8600
INTERNAL_PORT_DEFAULT = 8601
INTERNAL_HOST: Final = "127.0.0.1"
"""Where the internal port listens: operators are on this machine, or come through a tunnel."""
SECRET: Final = {"secret": True}
"""Metadata of a field whose value is never shown whole."""

Port = Annotated[int, Ge(1), Le(65535)]
Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, AllowInfNan(False), Gt(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """Where keys and accounts are kept."""

    __pydantic_config__: ClassVar = STRICT

    state_url: str | None = field(default=None, repr=False, metadata=SECRET)
    """Redis for keys and accounts, as `redis://`, `rediss://` or `unix://`. None: local mode starts its
    own, on loopback, with a password of its own."""

    def __post_init__(self) -> None:
        if self.state_url is not None and not _is_redis_url(self.state_url):
            raise ValueError("state_url must be an address that starts with redis://, rediss:// or unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """What one gateway takes, and how long it waits."""

    __pydantic_config__: ClassVar = STRICT

    max_body_bytes: Count = 10_000_000
    """A longer request body is refused."""
    max_in_flight: Count = 256
    """Requests that one gateway answers at once; the next one is refused."""
    max_queued: Count = 64
    """Requests that wait before a gateway which takes no more in; the next one is refused. With
    `ingress: proxy` as many more as `max_in_flight`: Serve's proxy counts those that it lets in, too."""
    max_connections: Count = 16_384
    """Connections of clients at once, idle ones too; fewer where the system allows fewer open files.
    HAProxy only."""
    header_timeout_s: Seconds = 10.0
    """From a connection, or a further request's first byte, to the end of the request's headers."""
    max_header_bytes: Annotated[int, Ge(4096)] = 16_384
    """First line and headers of one request."""
    body_timeout_s: Seconds = 60.0
    """From the end of the headers to the last byte of the body."""
    client_timeout_s: Seconds = 30.0
    """For which a client may take none of its answer; its request is aborted then."""
    keep_alive_s: Seconds = 75.0
    """For which a connection may stay open between two requests."""
    shutdown_grace_s: Annotated[float, AllowInfNan(False), Ge(0), Le(3600)] = 10.0
    """How long requests in flight may go on when the system, or a part of it, is told to stop."""
    request_timeout_s: Seconds = 600.0
    """From a request's arrival to its last token."""
    silence_s: Annotated[float, AllowInfNan(False), Ge(3)] = 10.0
    """An engine silent on the token bus for so long is taken for dead. Heartbeats come each second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """Ray's dashboard, for looking into the cluster. It asks for the cluster's token."""

    __pydantic_config__: ClassVar = STRICT

    host: str | None = None
    """Address to listen on. None: no dashboard is started."""
    port: Port = 8265
    """Port of the dashboard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestingConfig:
    """Faults made on purpose. Refused in mode `production`."""

    __pydantic_config__: ClassVar = STRICT
    __test__: ClassVar = False

    drop_bus_frame: Count | None = None
    """Each decode replica loses its Nth frame with tokens, once. Counted from 1."""
    holds: str | None = None
    """Folder of barriers that keep requests in a stage; an absolute path."""
    page_faults: str | None = None
    """Folder in which faults of cache pages are armed, for one engine at a time; an absolute path."""

    handle_arm: bool = False
    """Serve the model a second time, as `ID-through-handle`: its tokens come through Serve handles instead of
    the token bus. For `python -m load gateway-cost`."""

    def __post_init__(self) -> None:
        for name in ("holds", "page_faults"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_absolute():
                raise ValueError(f"{name} must be an absolute path")


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where finished spans go, and for how many requests they are made."""

    __pydantic_config__: ClassVar = STRICT

    otlp_endpoint: str | None = None
    """Where an OpenTelemetry collector takes traces over HTTP, like `http://collector:4318/v1/traces`.
    Headers that it asks for come from the environment: `OTEL_EXPORTER_OTLP_HEADERS`."""
    sample_ratio: Annotated[float, AllowInfNan(False), Ge(0), Le(1)] = 1.0
    """Share of the requests that are traced. A client's `traceparent` decides for its own request."""
    file: bool = True
    """Also into the state folder's `logs`, for `phasegate trace`."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint is None:
            return
        parts = urlsplit(self.otlp_endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("otlp_endpoint must start with http:// or https:// and name a host")
        if parts.username is not None or parts.password is not None:
            raise ValueError("otlp_endpoint must hold no password: use OTEL_EXPORTER_OTLP_HEADERS")
        if parts.query or parts.fragment:
            raise ValueError("otlp_endpoint must end with its path: a key goes to OTEL_EXPORTER_OTLP_HEADERS")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    """The whole file. Every key may be left out."""

    __pydantic_config__: ClassVar = STRICT

    mode: Literal["dev", "production"] = "dev"
    """`production` refuses what is fit for trying things out only: see below."""
    host: str = "127.0.0.1"
    """Address of the HTTP surface. Everything else listens on loopback."""
    port: Port = PORT_DEFAULT
    """Port of the HTTP surface."""
    internal_port: Annotated[int, Ge(0), Le(65535)] = INTERNAL_PORT_DEFAULT
    """Port on loopback for metrics, requests and traces; it asks for a token. 0: there is none."""
    expose: bool = False
    """Says that a `host` other than loopback is meant. The HTTP surface speaks clear text: let a proxy in
    front of it, or a private network, protect keys and prompts on the way."""
    ingress: Literal["haproxy", "proxy"] = "haproxy"
    """What takes clients' connections: HAProxy straight to the gateways, or Serve's own proxy."""
    profile: str = PROFILE_DEFAULT
    """Name of a model profile, or path of its file."""
    redis: RedisConfig = RedisConfig()
    limits: LimitsConfig = LimitsConfig()
    dashboard: DashboardConfig = DashboardConfig()
    testing: TestingConfig = TestingConfig()
    tracing: TracingConfig = TracingConfig()

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("host must be an address; 0.0.0.0 stands for all of this machine's")
        if self.internal_port == self.port:
            raise ValueError(f"internal_port must be another one than port, not {self.port} as well")
        if self.dashboard.host is not None and self.dashboard.port in (self.port, self.internal_port):
            raise ValueError(
                f"dashboard.port must be another one than port and internal_port, not {self.dashboard.port}"
            )

    @property
    def authority(self) -> str:
        """Host and port of the HTTP surface as a URL has them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_adapter: Final = TypeAdapter(SystemConfig)


def examine(raw: object) -> tuple[SystemConfig | None, list[Mistake]]:
    """The configuration in `raw`, as read from YAML, and every mistake in it.

    None: there are mistakes. An empty file means the defaults.
    """
    try:
        # As JSON: a strict check of Python values would want instances of our classes, not mappings.
        text = json.dumps({} if raw is None else raw, default=str)
    except (TypeError, ValueError) as bad:
        return None, [Mistake("configuration", f"not a plain mapping: {bad}")]
    try:
        return _adapter.validate_json(text), []
    except ValidationError as bad:
        return None, [
            Mistake(
                ".".join(map(str, error["loc"])) or "configuration",
                error["msg"].removeprefix("Value error, "),
            )
            for error in bad.errors(include_input=False, include_url=False)
        ]


def parse(raw: object, *, source: str) -> SystemConfig:
    """The configuration in `raw`, as read from YAML; an empty file means the defaults.

    Raises:
        ConfigError: with one line for each mistake.
    """
    config, mistakes = examine(raw)
    if config is None:
        raise ConfigError(told(source, mistakes))
    return config


def leaves(section: Any, above: str = "") -> Iterator[tuple[str, Any, bool]]:
    """(dotted key, value, whether it is secret) of every value of a configuration, in the schema's order."""
    for part in fields(section):
        key, value = f"{above}{part.name}", getattr(section, part.name)
        if hasattr(value, "__dataclass_fields__"):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value, bool(part.metadata.get("secret"))


def _is_redis_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        usable = parts.port != 0
    except ValueError:
        return False
    return usable and parts.scheme in ("redis", "rediss", "unix") and bool(parts.hostname or parts.path)


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Prepared models and own profiles: shared by all state folders."""
    if chosen := env.get("PHASEGATE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "~")).expanduser() / ".cache"
    return Path(base) / "phasegate"


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """State of the one system that a user runs without saying where."""
    base = env.get("XDG_STATE_HOME") or Path(env.get("HOME", "~")).expanduser() / ".local" / "state"
    return Path(base) / "phasegate"
