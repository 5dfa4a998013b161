"""What the sender remembers of transfers, and of the links to those who fetch them."""

from dataclasses import dataclass

from kv_transfer.api.errors import TransferCause
from kv_transfer.connector.wire import LaneLike
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.send_session import State


@dataclass
class Send:
    transfer_id: str
    due: float
    state: State
    peer_engine: str = ""
    """Who may fetch, once announced."""
    offer: m.Offer | None = None
    route: bytes = b""
    shipped_pages: int = 0
    on_wire: int = 0
    """Jobs handed to the lane and not ended."""
    cause: TransferCause = TransferCause.UNKNOWN_TRANSFER
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unwanted:
    engine_id: str
    """Who said so; empty: our own side."""
    due: float


@dataclass(frozen=True, slots=True)
class Over:
    """A transfer that was announced and has ended: whoever asks for it now is told at once."""

    cause: TransferCause
    due: float


@dataclass(frozen=True, slots=True)
class Lane:
    lane: LaneLike
    route: bytes
    """Whose link it is."""
