"""A scripted engine: the workers' engine protocol without a model."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kv_transfer.api import EngineGauges, HandoffReport, LedgerSnapshot, StartReport, Ticket
from workers.api import DecodeRequest, FaultKind, FinishReason, PrefillRequest
from workers.engine.base import Delta, Ending, EngineFault, Prefilled

NO_LEDGER = LedgerSnapshot(ledger="null")


def some_gauges(*, free_pages: int = 60, running: int = 0) -> EngineGauges:
    return EngineGauges(
        free_pages=free_pages,
        total_pages=64,
        running=running,
        waiting=0,
        in_flight_transfers=0,
        control_addresses=("tcp://127.0.0.1:7001",),
        page_bytes=1024,
        block_size=16,
    )


@dataclass
class ScriptedEngine:
    """Answers every decode request with `steps`, one tuple of token ids a step."""

    steps: tuple[tuple[int, ...], ...] = ((1,), (2,), (3,))
    finish: FinishReason = FinishReason.STOP
    handoff: HandoffReport | None = None
    cached_tokens: int = 0
    start_report: StartReport | None = None
    """Told with the first step."""
    fail_with: BaseException | None = None
    """Raised by requests, after the steps."""
    start_fails: bool = False
    hang_after: int | None = None
    """Stop after so many steps, until `go_on`; `reached` is set then."""
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False
    told: EngineGauges = field(default_factory=some_gauges)
    known: LedgerSnapshot = NO_LEDGER
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    tickets: dict[str, Ticket | None] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    closed: int = 0
    dead: bool = False

    async def start(self) -> None:
        if self.start_fails:
            raise EngineFault(FaultKind.ENGINE_DEAD, "scripted: no start")

    async def prefill(self, request: PrefillRequest, ticket: Ticket) -> Prefilled:
        self.tickets[request.request_id] = ticket
        async for _ in self._steps(request.request_id):
            pass
        return Prefilled(cached_tokens=self.cached_tokens, start=self.start_report)

    async def decode(self, request: DecodeRequest, ticket: Ticket | None) -> AsyncGenerator[Delta, None]:
        self.tickets[request.request_id] = ticket
        async for delta in self._steps(request.request_id):
            yield delta

    async def _steps(self, request_id: str) -> AsyncGenerator[Delta, None]:
        over = False
        try:
            for index, token_ids in enumerate(self.steps):
                await self._hang_at(index)
                await asyncio.sleep(0)
                last = index == len(self.steps) - 1 and self.fail_with is None
                over = last
                yield Delta(
                    token_ids=token_ids,
                    start=self.start_report if index == 0 else None,
                    ending=self._ending() if last else None,
                )
            if self.fail_with is not None:
                over = True
                raise self.fail_with
        finally:
            if not over:
                self.aborted.append(request_id)

    async def _hang_at(self, index: int) -> None:
        if index == self.hang_after:
            self.reached.set()
            await self.go_on.wait()

    def _ending(self) -> Ending:
        return Ending(reason=self.finish, cached_tokens=self.cached_tokens, handoff=self.handoff)

    async def release(self, transfer_id: str) -> None:
        if self.silent:
            raise EngineFault(FaultKind.ENGINE_DEAD, "scripted: silent")
        self.released.append(transfer_id)

    async def gauges(self) -> EngineGauges:
        if self.silent:
            raise EngineFault(FaultKind.ENGINE_DEAD, "scripted: silent")
        return self.told

    async def ledger(self) -> LedgerSnapshot:
        return self.known

    async def close(self) -> None:
        self.closed += 1
