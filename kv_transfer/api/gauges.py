"""Numbers that an engine process answers at any time, also while it is idle."""

from dataclasses import dataclass, field

from kv_transfer.api.integrity import NOTHING_CHECKED, Coverage


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """A snapshot of one engine. Cached pages that no request uses count as free."""

    free_pages: int
    total_pages: int
    running: int
    waiting: int
    in_flight_transfers: int
    control_addresses: tuple[str, ...]
    """Where peers send offers, by worker rank."""
    page_bytes: int
    block_size: int
    preemptions: int = 0
    """Times that a running request lost its pages to others and had to wait, since the engine's start."""
    malformed_messages: int = 0
    """On the control channel, since the engine's start: what was no message."""
    strangers_refused: int = 0
    """Connections to the control channel, since the engine's start, of who is no member of the system."""
    mismatches: dict[str, int] = field(default_factory=dict)
    """Pages that were not what they should have been, by cause, since the engine's start."""
    steps_checked: int = 0
    steps_unchecked: int = 0
    """Steps that computed something with their tables unchecked."""
    pages_checked: int = 0
    check_seconds: float = 0.0
    coverage: Coverage = NOTHING_CHECKED
