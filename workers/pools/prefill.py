"""The prefill replica: computes prompts and holds their pages for one decode engine."""

import asyncio

from kv_transfer.api import Role, Ticket
from workers.api import Phase, PrefillRequest, PrefillResult, WorkerFault
from workers.engine.base import EngineFault
from workers.pools.replica import Replica
from workers.telemetry import Work


class PrefillReplica(Replica):
    phase = Phase.PREFILL

    async def prefill(self, request: PrefillRequest, *, to: str | None = None) -> PrefillResult | WorkerFault:
        """Compute the prompt. The call announces its transfer; cancelling it aborts in the engine."""
        refused = self._enter()
        if refused is not None:
            return refused
        with self._parts.telemetry.work(
            "prefill", request.request_id, request.traceparent, prompt_tokens=len(request.token_ids)
        ) as work:
            return await self._prefill(request, work)

    async def _prefill(self, request: PrefillRequest, work: Work) -> PrefillResult | WorkerFault:
        started = self._parts.now()
        place = self._places.take(request.request_id)
        ticket = Ticket(
            transfer_id=request.transfer_id,
            role=Role.SEND,
            peer_engine=request.decode_engine,
            deadline_s=request.deadline_s,
            traceparent=work.traceparent,
        )
        try:
            async with asyncio.timeout(request.deadline_s) as limit:
                place.under(limit)
                await self._parts.holds.at("prefill_called", request.request_id)
                done = await self._engine.prefill(request, ticket)
            work.begun(done.start)
            work.note(cached_tokens=done.cached_tokens)
            return PrefillResult(cached_tokens=done.cached_tokens, seconds=self._parts.now() - started)
        except asyncio.CancelledError:
            raise
        except BaseException as bad:  # noqa: BLE001 - not even SystemExit may leave: its caller would hang
            return self._fault(request.request_id, place.reason(bad), request.deadline_s, work)
        finally:
            self._places.give_back(place)
            self._leave()

    async def release(self, transfer_id: str, *, to: str | None = None) -> WorkerFault | None:
        """Nobody will fetch these pages: the request that they were computed for has ended. None: done."""
        try:
            await self._engine.release(transfer_id)
        except EngineFault as bad:
            return WorkerFault(kind=bad.kind, detail=bad.detail)
        return None
