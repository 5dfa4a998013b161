"""What the two halves of the connector tell each other with every engine step.

scheduler side --StepOrders--> worker side      (vLLM's connector metadata)
scheduler side <--WorkerNews-- worker side      (vLLM's worker metadata)
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kv_transfer.api.handoff import HandoffReport, Ticket


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Fetch pages `first_page ...` of this transfer into `page_ids`, which are allocated and empty."""

    request_id: str
    ticket: Ticket
    first_page: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendProgress:
    """State of one announced request after this step's forward: its pages and how far they are written."""

    transfer_id: str
    page_ids: tuple[int, ...]
    computed_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """A finished request whose pages stay allocated until its transfer is over."""

    transfer_id: str
    request_id: str


@dataclass
class StepOrders(KVConnectorMetadata):
    # decode side
    receives: list[ReceiveOrder] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Transfers whose request went away while its pages were coming."""
    declines: list[Ticket] = field(default_factory=list)
    """Transfers that are not needed, or whose request went away before it had pages."""
    # prefill side
    announces: list[Ticket] = field(default_factory=list)
    progress: list[SendProgress] = field(default_factory=list)
    suspended: list[str] = field(default_factory=list)
    """Transfers whose request was preempted: its pages are no longer its own."""
    held: list[Held] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Transfers whose request ended without complete pages."""

    def empty(self) -> bool:
        return not any(getattr(self, name) for name in self.__dataclass_fields__)


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    reports: dict[str, HandoffReport] = field(default_factory=dict)
    """By decode request id, for transfers that ended in this step."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerNews":
        """Over tensor-parallel ranks: bytes add up, the slowest and the worst decide."""
        assert isinstance(other, WorkerNews)
        merged = dict(self.reports)
        for request_id, theirs in other.reports.items():
            ours = merged.get(request_id)
            if ours is None:
                merged[request_id] = theirs
                continue
            worst = theirs if theirs.cause is not None else ours
            merged[request_id] = HandoffReport(
                outcome=worst.outcome,
                pages=max(ours.pages, theirs.pages),
                wire_bytes=ours.wire_bytes + theirs.wire_bytes,
                seconds=max(ours.seconds, theirs.seconds),
                started_at=ours.started_at,
                cause=worst.cause,
            )
        return WorkerNews(merged)


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Told to the scheduler side once, at start-up."""

    control: str
    """ZeroMQ address on which this worker takes offers."""
    page_bytes: int
    block_size: int
