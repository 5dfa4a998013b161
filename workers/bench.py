"""What the token bus is measured against: tokens through the stream of a Serve call.

The engine, the batch and the item are the same; only the way to the gateway differs. It is the best that this
way can be: the engine's deltas go out directly, with no queue, task or history between.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from workers.api import DecodeRequest, DecodeResult, Item, WorkerFault
from workers.api.bus import encode_item
from workers.engine.base import EngineFault
from workers.pools.decode import DecodeReplica


class HandleDecode(DecodeReplica):
    """A decode replica that can send its answers on both ways."""

    async def stream(
        self, request: DecodeRequest, *, to: str | None = None
    ) -> AsyncGenerator[bytes | DecodeResult | WorkerFault, None]:
        """Encoded items, then the result; or a fault, which ends it at any point.

        Closing it early aborts in the engine.
        """
        refused = self._enter()
        if refused is not None:
            yield refused
            return
        started = self._parts.now()
        with self._parts.telemetry.work("decode", request.request_id, request.traceparent) as work:
            try:
                ticket = await self._ticket(request, work.traceparent)
                sent, first_at = 0, started
                async with (
                    asyncio.timeout(request.deadline_s),
                    aclosing(self._engine.decode(request, ticket)) as deltas,
                ):
                    async for delta in deltas:
                        ending = delta.ending
                        if not sent:
                            first_at = self._parts.now()
                        yield encode_item(
                            Item(
                                request_id=request.request_id,
                                attempt=request.attempt,
                                first_index=sent,
                                token_ids=delta.token_ids,
                                finish=None if ending is None else ending.reason,
                            )
                        )
                        sent += len(delta.token_ids)
                        if ending is not None:
                            yield DecodeResult(
                                output_tokens=sent,
                                finish_reason=ending.reason,
                                cached_tokens=ending.cached_tokens,
                                handoff=ending.handoff,
                                seconds=self._parts.now() - started,
                                first_token_s=first_at - started,
                            )
            except (EngineFault, TimeoutError) as bad:
                yield self._fault(request.request_id, bad, request.deadline_s, work)
            finally:
                self._leave()
