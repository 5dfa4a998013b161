"""Why a transfer did not deliver. Values, not exceptions: they cross processes."""

from enum import StrEnum


class TransferCause(StrEnum):
    """Also the metric label `cause`."""

    UNKNOWN_TRANSFER = "unknown_transfer"  # never announced on the prefill side, or already over
    FOREIGN_PEER = "foreign_peer"  # announced for another decode engine
    CONTRACT_MISMATCH = "contract_mismatch"  # the two engines serve different models: see `Contract`
    LAYOUT_MISMATCH = "layout_mismatch"
    CHECKSUM = "checksum"
    STALE_TRANSFER = "stale_transfer"  # the ticket is of an engine that was restarted, or pages changed hands
    NONFINITE_SOURCE = "nonfinite_source"  # NaN or Inf in pages that were to be converted
    PROTOCOL = "protocol"  # the peer said something that its state does not allow
    LINK_DOWN = "link_down"
    DEADLINE = "deadline"
    PREFILL_ENDED = "prefill_ended"  # aborted or failed before its pages were complete
    CANCELLED = "cancelled"  # the decode request went away


class TransferError(Exception):
    """A transfer failed; `cause` says why, `detail` is for operators, never for clients."""

    def __init__(self, cause: TransferCause, detail: str = "") -> None:
        super().__init__(cause, detail)
        self.cause = cause
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else str(self.cause)
