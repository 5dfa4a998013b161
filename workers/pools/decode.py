"""The decode replica: produces answers and puts them on the token bus."""

import asyncio
from contextlib import aclosing
from typing import Final

from kv_transfer.api import Role, StartReport, Ticket, TransferCause
from workers.api import (
    DecodeRequest,
    DecodeResult,
    FaultKind,
    Item,
    Phase,
    RefetchResult,
    WorkerFault,
)
from workers.engine.base import Ending, EngineFault
from workers.pools.config import ReplicaConfig
from workers.pools.history import TokenHistory
from workers.pools.replica import Parts, Replica
from workers.telemetry import Work

TRANSFER_DEADLINE_S: Final = 60.0
"""A transfer takes milliseconds; after so long decode computes the prompt itself."""


class DecodeReplica(Replica):
    phase = Phase.DECODE

    def __init__(self, config: ReplicaConfig, parts: Parts) -> None:
        super().__init__(config, parts)
        self._history = TokenHistory(parts.now)

    async def decode(self, request: DecodeRequest, *, to: str | None = None) -> DecodeResult | WorkerFault:
        """Produce the answer on the bus; return when its last item was handed over.

        Cancelling the call aborts in the engine.
        """
        refused = self._enter()
        if refused is not None:
            return refused
        with self._parts.telemetry.work(
            "decode", request.request_id, request.traceparent, attempt=request.attempt
        ) as work:
            return await self._decode(request, work)

    async def _decode(self, request: DecodeRequest, work: Work) -> DecodeResult | WorkerFault:
        started = self._parts.now()
        place = self._places.take(request.request_id, request.gateway_id)
        tokens = self._history.begin(request.request_id)
        try:
            async with asyncio.timeout(request.deadline_s) as limit:
                place.under(limit)
                ending, first_at = await self._produce(request, tokens, work)
                await self._bus.flushed()
            work.note(
                cached_tokens=ending.cached_tokens,
                output_tokens=len(tokens),
                finish_reason=ending.reason.value,
            )
            return DecodeResult(
                output_tokens=len(tokens),
                finish_reason=ending.reason,
                cached_tokens=ending.cached_tokens,
                handoff=ending.handoff,
                seconds=self._parts.now() - started,
                first_token_s=first_at - started,
            )
        except asyncio.CancelledError:
            raise
        except BaseException as bad:  # noqa: BLE001 - not even SystemExit may leave: its caller would hang
            return self._fault(request.request_id, place.reason(bad), request.deadline_s, work)
        finally:
            self._history.end(request.request_id, tokens)
            self._places.give_back(place)
            self._leave()

    async def refetch(
        self, request_id: str, from_index: int, *, to: str | None = None
    ) -> RefetchResult | WorkerFault:
        """Tokens of a live or recently ended request, from `from_index` on."""
        if from_index < 0:
            return WorkerFault(kind=FaultKind.INVALID_REQUEST, detail="from_index: below 0")
        tokens = self._history.since(request_id, from_index)
        if tokens is None:
            return WorkerFault(
                kind=FaultKind.INVALID_REQUEST, detail=f"request {request_id} is unknown or long over"
            )
        return RefetchResult(first_index=from_index, token_ids=tokens)

    async def _produce(self, request: DecodeRequest, tokens: list[int], work: Work) -> tuple[Ending, float]:
        """How the answer ended, and when its first token came."""
        first_at = 0.0
        await self._parts.holds.at("decode_called", request.request_id)
        ticket = await self._ticket(request, work.traceparent)
        self._bus.attach(request.gateway_id, request.bus_address)
        deltas = self._engine.decode(request, ticket)
        async with aclosing(deltas):
            async for delta in deltas:
                ending = delta.ending
                if tokens:
                    stage = "decoding" if ending is None else "last_token"
                    await self._parts.holds.at(stage, request.request_id)
                else:
                    first_at = self._parts.now()
                    work.event("first_token")
                    work.begun(delta.start)
                    _refuse_foreign(delta.start)
                item = Item(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    first_index=len(tokens),
                    token_ids=delta.token_ids,
                    finish=None if ending is None else ending.reason,
                    handoff=None if delta.start is None else delta.start.handoff,
                )
                tokens.extend(delta.token_ids)
                self._bus.publish(request.gateway_id, item)
                if ending is not None:
                    work.event("last_token")
                    work.ended(ending.handoff)
                    return ending, first_at
        raise EngineFault(FaultKind.INTERNAL, "the engine's answer has no end")

    async def _ticket(self, request: DecodeRequest, traceparent: str) -> Ticket | None:
        """Where the pages are fetched. Addresses come from the registry, never from a request."""
        if request.transfer_id is None or request.prefill_engine is None:
            return None
        addresses = await self._parts.registry.lookup(request.prefill_engine)
        if addresses is None:
            raise EngineFault(FaultKind.PEER_UNKNOWN, f"prefill engine {request.prefill_engine}")
        return Ticket(
            transfer_id=request.transfer_id,
            role=Role.RECEIVE,
            peer_engine=request.prefill_engine,
            peer_addresses=addresses,
            deadline_s=min(request.deadline_s, TRANSFER_DEADLINE_S),
            traceparent=traceparent,
        )


def _refuse_foreign(start: StartReport | None) -> None:
    """Who of the two serves another model than the gateway's is not known here: nobody's answer is given.

    Raises:
        EngineFault: prefill refused its pages because the contracts differ.
    """
    handoff = None if start is None else start.handoff
    if handoff is not None and handoff.cause is TransferCause.CONTRACT_MISMATCH:
        raise EngineFault(FaultKind.CONTRACT_MISMATCH, handoff.detail)
