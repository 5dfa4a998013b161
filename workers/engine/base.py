"""The part of an inference engine that pools use."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kv_transfer.api import EngineGauges, HandoffReport, LedgerSnapshot, PageFault, StartReport, Ticket
from workers.api import DecodeRequest, FaultKind, FinishReason, PrefillRequest


class EngineFault(Exception):
    """The engine did not do what it was asked; `kind` says why, `detail` is for operators."""

    def __init__(self, kind: FaultKind, detail: str, page_fault: PageFault | None = None) -> None:
        """
        Args:
            page_fault: of the kind `PAGE_INTEGRITY`.
        """
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail
        self.page_fault = page_fault

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What is known of a request when its last token is out."""

    reason: FinishReason
    cached_tokens: int
    """Prompt tokens found in this engine's own prefix cache."""
    handoff: HandoffReport | None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step brought for one request. One is made for every token: a dataclass costs more."""

    token_ids: tuple[int, ...]
    start: StartReport | None = None
    """Set on the first delta only, where the engine tells such things."""
    ending: Ending | None = None
    """Set on the last delta only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt's pages are computed."""

    cached_tokens: int
    """Prompt tokens that the prefix cache had."""
    start: StartReport | None = None


class Engine(Protocol):
    """One engine. Every method but `start` and `close` needs a started engine."""

    async def start(self) -> None:
        """Return when the engine takes requests.

        Raises:
            EngineFault: it did not come up.
        """

    async def prefill(self, request: PrefillRequest, ticket: Ticket) -> Prefilled:
        """Compute the prompt's pages.

        Cancelling aborts the request in the engine.

        Raises:
            EngineFault
        """

    def decode(self, request: DecodeRequest, ticket: Ticket | None) -> AsyncGenerator[Delta, None]:
        """The answer, step by step; the last delta has an ending. Closing it early aborts.

        Raises:
            EngineFault: while it runs.
        """

    async def release(self, transfer_id: str) -> None:
        """Let go of a prompt's pages that nobody will fetch any more. Unknown transfers are no mistake.

        Raises:
            EngineFault: the engine is dead or silent.
        """

    async def gauges(self) -> EngineGauges:
        """A snapshot, also from an idle engine.

        Raises:
            EngineFault: the engine is dead, or silent for longer than it may be.
        """

    async def ledger(self) -> LedgerSnapshot:
        """Who has which page, also of an idle engine. Ids only.

        Raises:
            EngineFault: as `gauges`.
        """

    @property
    def dead(self) -> bool: ...

    async def close(self) -> None:
        """End the engine and its processes. May be called twice."""
