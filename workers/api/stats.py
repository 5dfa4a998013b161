"""What an engine answers: results of control calls, and the state of a replica."""

from dataclasses import dataclass
from enum import StrEnum

from kv_transfer.api import Contract, Coverage, HandoffReport


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillResult:
    cached_tokens: int
    """Prompt tokens found in this engine's prefix cache."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeResult:
    output_tokens: int
    """How many tokens were put on the bus: a stream is complete only when the receiver has as many."""
    finish_reason: FinishReason
    cached_tokens: int
    """Prompt tokens found in this engine's own prefix cache."""
    handoff: HandoffReport | None
    seconds: float
    first_token_s: float | None = None
    """From the call to the engine's first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """Facts about a replica that do not change while it lives."""

    replica_id: str
    """Serve's unique id."""
    engine_id: str
    """128 random bits in hex per engine start: the engine's epoch."""
    phase: Phase
    format: str
    """Cache format, e.g. `bf16`."""
    pid: int
    block_size: int
    page_bytes: int
    total_pages: int
    device: str
    """`cpu` or `cuda`."""
    started_at: int
    """When the engine was ready: Unix seconds."""
    coverage: Coverage
    """What of its pages is checked."""
    contract: Contract
    """Of what its engine has loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIntegrity:
    """What a replica checks of its pages, and has found since its start."""

    device: str
    since: int
    """When the engine was ready: Unix seconds."""
    coverage: Coverage
    steps_checked: int
    steps_unchecked: int
    pages_checked: int
    mismatches: dict[str, int]
    """By cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One row of `phasegate status`. Gauges only."""

    id: str
    phase: Phase
    format: str
    pid: int
    free_pages: int
    total_pages: int
    running: int
    waiting: int
    in_flight_transfers: int
    bus_queue: int
    """Items handed to the bus and not yet accepted by its sockets."""
    inside: int
    """Calls that the replica has taken in and not answered; the engine need not know of all of them."""
    contract: str
    """The short form of its contract."""
    integrity: ReplicaIntegrity


@dataclass(frozen=True, slots=True, kw_only=True)
class RefetchResult:
    """Tokens of a live or recently ended request, from the asked index on."""

    first_index: int
    token_ids: tuple[int, ...]
