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
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.checker import CheckCounts
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.device import NOTHING_SEEN, Seen, Verdict
from kv_transfer.integrity.prestep import Rights
from kv_transfer.testing.table_faults import TableFault


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
    """Fetch pages `first_page ...` of this transfer into `page_ids`, which are allocated and empty."""

    request_id: str
    ticket: Ticket
    first_page: int
    page_ids: tuple[int, ...]
    tags: tuple[int, ...] = ()
    """Of the pages, when they were allocated; none without a ledger."""


@dataclass(frozen=True, slots=True)
class SendProgress:
    """State of one announced request after this step's forward: its pages and how far they are written."""

    transfer_id: str
    page_ids: tuple[int, ...]
    computed_tokens: int
    prompt_tokens: int
    request_id: str = ""
    tags: tuple[int, ...] = ()
    """Of the pages, when the request was given them; none without a ledger."""


@dataclass(frozen=True, slots=True)
class Held:
    """A finished request whose pages stay allocated until its transfer is over."""

    transfer_id: str
    request_id: str


@dataclass
class CheckOrders:
    """What this step's tables must say."""

    delta: LedgerDelta
    plan: dict[str, tuple[int, int]]
    """By request: tokens computed before, tokens scheduled."""
    rights: Rights
    emptied: bool = False
    """Every request of the step was taken out of it."""
    number: int = 0
    """Of the step."""
    leans: dict[str, set[str]] = field(default_factory=dict)
    """By request that got pages by their content in this step: who writes these, or wrote them in steps of
    which it is not known whether they were right."""


@dataclass
class StepOrders(KVConnectorMetadata):
    check: CheckOrders | None = None
    """None without a ledger."""
    spoiled: tuple[TableFault, ...] = ()
    """Faults on purpose."""
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
    faults: dict[str, PageFault] = field(default_factory=dict)
    """Requests that must end: their pages are not what they were given."""
    verdict: Verdict | Seen = NOTHING_SEEN
    """The same from a device, not yet explained; see `integrity.device`."""
    refused: list[IntegrityCause] = field(default_factory=list)
    """What was ordered, or came, and was not done: clearing, copying, shipping, taking in."""
    counts: CheckCounts = field(default_factory=CheckCounts)

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
                detail=worst.detail,
            )
        return WorkerNews(
            merged,
            {**other.faults, **self.faults},
            Seen({**other.verdict.read(), **self.verdict.read()}),
            self.refused + other.refused,
            max(self.counts, other.counts, key=lambda counts: (counts.unchecked, counts.seconds)),
        )


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """Told to the scheduler side once, at start-up."""

    control: str
    """ZeroMQ address on which this worker takes offers."""
    page_bytes: int
    block_size: int
