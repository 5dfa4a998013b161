"""Expected failures. They travel as values: a remote exception's text is a traceback with addresses."""

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """Also the metric label `fault`."""

    BUSY = "busy"
    DRAINING = "draining"
    DEADLINE = "deadline"
    PEER_UNKNOWN = "peer_unknown"  # the named prefill engine is not in the registry
    INVALID_REQUEST = "invalid_request"  # the engine refused what the gateway had let through
    ENGINE_DEAD = "engine_dead"
    CANCELLED = "cancelled"  # the call was cut off, by a shutdown or by Serve; the engine may be well
    PAGE_INTEGRITY = "page_integrity"  # a cache page was not the request's own, and was not used
    CONTRACT_MISMATCH = "contract_mismatch"  # prefill and decode serve different models: see `Contract`
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFault:
    kind: FaultKind
    detail: str = ""
    """For operators' logs; never shown to a client."""
