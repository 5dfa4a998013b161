"""What one gateway replica is told at start. Secrets come apart, so that no printout holds them."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from gateway.routing.pressure import Marks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The model that the pools serve."""

    id: str
    """Public id, as in the path of `ai/run`."""
    aliases: tuple[str, ...] = ()
    model_dir: str
    """Folder with configuration, tokenizer and chat template. Weights are not read here."""
    context_length: int
    block_size: int
    created: int = 0
    """Unix seconds, for the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Limits and deadlines of one gateway replica."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    model: ModelFacts
    host: str = "127.0.0.1"
    """Interface on which the token bus listens; engines connect to it."""
    mode: Literal["dev", "production"] = "dev"
    max_body_bytes: int = 10_000_000
    body_timeout_s: float = 60.0
    """From the end of the headers to the last byte of the body."""
    max_in_flight: int = 256
    """Requests being answered at once; the next one is refused."""
    request_timeout_s: float = 600.0
    """From arrival to the last token."""
    proxy_labels: bool = False
    """A proxy in front gives requests an `x-request-id` and returns it on answers, as Serve's does."""
    shutdown_grace_s: float = 10.0
    """How long requests in flight may go on when this gateway is told to stop."""
    marks: Marks = field(default_factory=Marks)
    """Where decode has two pools: when new requests go to the denser one."""
    holds: str | None = None
    """Folder of barriers for tests, in mode `dev` only: see `kv_transfer.testing.holds`."""
    silence_s: float = 10.0
    """An engine that says nothing on the bus for so long is taken for dead. Heartbeats come each second."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "body_timeout_s", "max_in_flight", "request_timeout_s", "silence_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.holds is not None and self.mode != "dev":
            raise ValueError("holds: barriers on purpose are refused unless mode is dev")
        if self.silence_s < 3:
            raise ValueError(
                f"silence_s must be at least 3: heartbeats come once a second, not {self.silence_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySecrets:
    """Built inside the replica from a file; never part of a deployment's configuration."""

    state_url: str = field(repr=False)
    """Redis, role `state`."""
    pepper: bytes = field(repr=False)
    """Key of the HMAC under which API keys are stored."""

    def __post_init__(self) -> None:
        if len(self.pepper) < 16:
            raise ValueError("the pepper must have at least 16 bytes")
