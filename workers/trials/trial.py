"""One engine, or a prefill and a decode engine, that answer as they are told."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from time import perf_counter
from typing import Any, Final

import numpy as np

from kv_transfer.api import Membership, Role, Ticket
from workers.api import Phase, PrefillRequest
from workers.profile.fingerprint import contract_of
from workers.profile.schema import ModelProfile, parse_profile
from workers.trials import forced
from workers.trials.engine import Answer, TrialEngine
from workers.trials.orders import Generate, Generated, Ids, Order, Ready, Score, Scored, Start

DEADLINE_S: Final = 600.0
GLANCE_S: Final = 0.2


class Trial:
    def __init__(self, start: Start) -> None:
        profile = parse_profile(start.profile, source="trial")
        membership = Membership.mint()
        self._decode = _engine(profile, Phase.DECODE, start.model, membership)
        self._prefill = _engine(profile, Phase.PREFILL, start.model, membership) if start.pair else None
        self._decode.fit_out(start.pages)
        self._addresses: tuple[str, ...] = ()

    async def begin(self, life: AsyncExitStack) -> Ready:
        for engine in filter(None, (self._prefill, self._decode)):
            life.push_async_callback(engine.close)
            await engine.start()
        if self._prefill is not None:
            self._addresses = (await self._prefill.gauges()).control_addresses
        gauges = await self._decode.gauges()
        return Ready(pages=gauges.total_pages, block_size=gauges.block_size, page_bytes=gauges.page_bytes)

    async def obey(self, order: Order) -> Any:
        if isinstance(order, Score):
            return await self.score(order)
        if isinstance(order, Generate):
            return await self.generate(order)
        return await self._decode.skew(order.factor)

    async def score(self, order: Score) -> list[Scored]:
        vocabulary, rows = self._decode.vocabulary, len(order.prompts)
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes.npy"
            if order.continuations:
                forced.new_file(notes, (rows, order.tokens, len(forced.FIELDS)), np.float64)
            else:
                forced.new_file(Path(order.reference), (rows, order.tokens, vocabulary), np.float32)

            def led(row: int) -> dict[str, Any]:
                return {
                    "reference": order.reference,
                    "notes": str(notes) if order.continuations else "",
                    "row": row,
                    "force": list(order.continuations[row]) if order.continuations else [],
                }

            answers = await self._in_turns(
                order.prompts, order.tokens, order.concurrency, led, await self._prefilled(order.prompts)
            )
            noted = np.load(notes) if order.continuations else None
        return [_scored(a, None if noted is None else noted[row]) for row, a in enumerate(answers)]

    async def generate(self, order: Generate) -> Generated:
        tickets = await self._prefilled(order.prompts)
        before = await self._decode.gauges()
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, (await self._decode.gauges()).running)
                await asyncio.sleep(GLANCE_S)

        watching = asyncio.create_task(watch())
        began = perf_counter()
        answers = await self._in_turns(order.prompts, order.tokens, order.concurrency, None, tickets)
        seconds = perf_counter() - began
        watching.cancel()
        after = await self._decode.gauges()
        return Generated(
            seconds=seconds,
            tokens=sum(len(answer.token_ids) for answer in answers),
            preemptions=after.preemptions - before.preemptions,
            most_running=most,
            outcomes=dict(Counter(a.handoff.outcome.value for a in answers if a.handoff is not None)),
        )

    async def _prefilled(self, prompts: Sequence[Ids]) -> list[tuple[str, Ticket | None]]:
        """A salt, and the ticket to the pages, of each prompt. All have been computed."""
        if self._prefill is None:
            return [(token_hex(8), None) for _ in prompts]
        prefill, decode_id, prefill_id = self._prefill, self._decode.id, self._prefill.id
        made: list[tuple[str, Ticket | None]] = []
        waiting: list[Awaitable[Any]] = []
        for prompt in prompts:
            salt, transfer = token_hex(8), token_hex(16)
            request = PrefillRequest(
                request_id=token_hex(16),
                transfer_id=transfer,
                decode_engine=decode_id,
                token_ids=prompt,
                cache_salt=salt,
                deadline_s=DEADLINE_S,
            )
            send = Ticket(transfer_id=transfer, role=Role.SEND, peer_engine=decode_id, deadline_s=DEADLINE_S)
            waiting.append(prefill.prefill(request, send))
            receive = Ticket(
                transfer_id=transfer,
                role=Role.RECEIVE,
                peer_engine=prefill_id,
                peer_addresses=self._addresses,
                deadline_s=DEADLINE_S,
            )
            made.append((salt, receive))
        await asyncio.gather(*waiting)
        return made

    async def _in_turns(
        self,
        prompts: Sequence[Ids],
        tokens: int,
        concurrency: int,
        led: Callable[[int], dict[str, Any]] | None,
        tickets: Sequence[tuple[str, Ticket | None]],
    ) -> list[Answer]:
        """Each client takes the next prompt when its last one is answered."""
        answers: dict[int, Answer] = {}
        rows = iter(range(len(prompts)))

        async def client() -> None:
            for row in rows:
                salt, ticket = tickets[row]
                answers[row] = await self._decode.answer(
                    token_hex(16),
                    prompts[row],
                    salt=salt,
                    tokens=tokens,
                    ticket=ticket,
                    lead=None if led is None else led(row),
                )

        await asyncio.gather(*(client() for _ in range(concurrency)))
        return [answers[row] for row in range(len(prompts))]


def _engine(profile: ModelProfile, phase: Phase, model: str, membership: Membership) -> TrialEngine:
    return TrialEngine(
        profile,
        phase,
        model_dir=model,
        engine_id=token_hex(16),
        host="127.0.0.1",
        device="cpu",
        contract=contract_of(profile, Path(model)),
        membership=membership,
        faults={},
    )


def _scored(answer: Answer, noted: "np.ndarray[Any, Any] | None") -> Scored:
    columns = [()] * len(forced.FIELDS) if noted is None else [tuple(map(float, c)) for c in noted.T]
    named = dict(zip(forced.FIELDS, columns, strict=True))
    return Scored(
        continuation=answer.token_ids,
        dlogprob=named["dlogprob"],
        kl=named["kl"],
        same_argmax=tuple(value == 1.0 for value in named["same_argmax"]),
        outcome=None if answer.handoff is None else answer.handoff.outcome.value,
    )
