"""The ticket that lets one decode request fetch its pages, and the report that comes back."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from kv_transfer.api.errors import TransferCause

PARAMS_KEY: Final = "phasegate"
"""Key inside vLLM's `kv_transfer_params`. Clients can never set it."""
START_KEY: Final = "phasegate_start"
"""Likewise, in what an engine answers first."""


class Role(StrEnum):
    SEND = "send"
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One transfer, as told to one engine. `transfer_id` is a capability: 128 random bits in hex."""

    transfer_id: str
    role: Role
    peer_engine: str
    """Engine id of the other side."""
    peer_addresses: tuple[str, ...] = ()
    """Control addresses of the prefill workers, by rank (RECEIVE only): from the replica registry."""
    deadline_s: float = 60.0
    """Seconds from arrival in the engine until this side gives up."""
    traceparent: str = ""
    """W3C trace context of the request that the pages are for."""

    def to_params(self) -> dict[str, Any]:
        """The `kv_transfer_params` of an engine request."""
        return {PARAMS_KEY: msgspec.to_builtins(self)}

    @staticmethod
    def from_params(params: Mapping[str, Any] | None) -> "Ticket | None":
        """The ticket in an engine request, or None.

        Raises:
            msgspec.ValidationError: there is one, and it is malformed.
        """
        raw = (params or {}).get(PARAMS_KEY)
        return None if raw is None else msgspec.convert(raw, Ticket)


class HandoffOutcome(StrEnum):
    """Also the metric label `outcome`."""

    SHIPPED = "shipped"
    NOTHING_MISSING = "nothing_missing"  # decode had every page in its own cache
    RECOMPUTED = "recomputed"  # the transfer failed; decode computed the prompt itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """What decode can say about the transfer when its request ends."""

    outcome: HandoffOutcome
    pages: int = 0
    """Pages received and copied into the cache."""
    wire_bytes: int = 0
    seconds: float = 0.0
    """From posting the offer to the last page copied in."""
    started_at: float | None = None
    """When the offer was posted: monotonic seconds of this host's clock, the same in all its processes."""
    cause: TransferCause | None = None
    """Set when the outcome is RECOMPUTED."""
    detail: str = ""
    """What the sender said about the cause, for operators."""

    def to_params(self) -> dict[str, Any]:
        return {PARAMS_KEY: msgspec.to_builtins(self)}

    @staticmethod
    def from_params(params: Mapping[str, Any] | None) -> "HandoffReport | None":
        raw = (params or {}).get(PARAMS_KEY)
        return None if raw is None else msgspec.convert(raw, HandoffReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What an engine tells of a request with its first output."""

    queued_s: float
    """From its arrival in the engine to the first step that computed it; decode waits for its pages then."""
    handoff: HandoffReport | None
    """How its pages came; None when none were to come, or the engine told it already."""

    def to_params(self) -> dict[str, Any]:
        return {START_KEY: msgspec.to_builtins(self)}

    @staticmethod
    def from_params(params: Mapping[str, Any] | None) -> "StartReport | None":
        raw = (params or {}).get(START_KEY)
        return None if raw is None else msgspec.convert(raw, StartReport)
