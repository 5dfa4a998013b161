"""Two real engines and the real connector between them, without Ray or HTTP: token ids are compared."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from kv_transfer.api import HandoffOutcome, HandoffReport, IntegrityCause, Role, Ticket, TransferCause
from tests.conftest import ANSWER_TOKENS, Answers, Texts
from tests.support.members import MEMBERSHIP
from tests.support.prompts import PAGE
from workers.api import DecodeRequest, Phase, PrefillRequest, Sampling
from workers.engine.base import EngineFault
from workers.engine.vllm_engine import VllmEngine
from workers.profile.schema import parse_profile

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

ROOT = Path(__file__).parents[2]
WRONG = "f0"
"""Transfers whose id starts so get another request's pages, on purpose."""
SALT = "a tenant's salt"


@dataclass
class Pair:
    prefill: VllmEngine
    decode: VllmEngine
    prefill_id: str
    decode_id: str
    addresses: tuple[str, ...]

    async def answer(
        self, ids: list[int], *, transfer_id: str = "", salt: str = SALT, max_tokens: int = ANSWER_TOKENS
    ) -> tuple[list[int], HandoffReport | None]:
        """One request through both engines, dispatched together."""
        transfer_id = transfer_id or "00" + secrets.token_hex(15)
        computing = asyncio.create_task(self.compute(ids, transfer_id, salt=salt))
        try:
            return await self.fetch(ids, transfer_id, salt=salt, max_tokens=max_tokens)
        finally:
            await computing

    async def compute(
        self, ids: list[int], transfer_id: str, *, salt: str = SALT, deadline_s: float = 60.0
    ) -> None:
        request = PrefillRequest(
            request_id=secrets.token_hex(16),
            transfer_id=transfer_id,
            decode_engine=self.decode_id,
            token_ids=tuple(ids),
            cache_salt=salt,
            deadline_s=deadline_s,
        )
        ticket = Ticket(
            transfer_id=transfer_id, role=Role.SEND, peer_engine=self.decode_id, deadline_s=deadline_s
        )
        await self.prefill.prefill(request, ticket)

    async def fetch(
        self,
        ids: list[int],
        transfer_id: str,
        *,
        salt: str = SALT,
        max_tokens: int = ANSWER_TOKENS,
        deadline_s: float = 60.0,
    ) -> tuple[list[int], HandoffReport | None]:
        ticket = Ticket(
            transfer_id=transfer_id,
            role=Role.RECEIVE,
            peer_engine=self.prefill_id,
            peer_addresses=self.addresses,
            deadline_s=deadline_s,
        )
        request = DecodeRequest(
            request_id=secrets.token_hex(16),
            attempt=1,
            token_ids=tuple(ids),
            cache_salt=salt,
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
            stop_token_ids=(2,),
            gateway_id="test",
            bus_address="",
            deadline_s=120.0,
        )
        tokens: list[int] = []
        report = None
        async for delta in self.decode.decode(request, ticket):
            tokens += delta.token_ids
            if delta.ending is not None:
                report = delta.ending.handoff
        return tokens, report

    async def settled(self, within_s: float = 10.0) -> bool:
        """Whether both engines hold no page, request or transfer, at once or soon."""
        for _ in range(int(within_s / 0.1)):
            gauges = [await engine.gauges() for engine in (self.prefill, self.decode)]
            if all(
                g.free_pages == g.total_pages and not g.running + g.waiting + g.in_flight_transfers
                for g in gauges
            ):
                return True
            await asyncio.sleep(0.1)
        return False


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pair(model_dir: Path) -> AsyncIterator[Pair]:
    profile = parse_profile(
        yaml.safe_load((ROOT / "deploy/models/exact.yaml").read_text()), source="exact.yaml"
    )
    ids = {phase: secrets.token_hex(16) for phase in Phase}
    engines = {
        phase: VllmEngine(
            profile,
            phase,
            model_dir=str(model_dir),
            engine_id=ids[phase],
            host="127.0.0.1",
            device="cpu",
            membership=MEMBERSHIP,
            faults={"foreign_pages": True, "only_transfers": WRONG} if phase is Phase.PREFILL else {},
        )
        for phase in Phase
    }
    for engine in engines.values():
        await engine.start()
    addresses = (await engines[Phase.PREFILL].gauges()).control_addresses
    yield Pair(
        engines[Phase.PREFILL], engines[Phase.DECODE], ids[Phase.PREFILL], ids[Phase.DECODE], addresses
    )
    for engine in engines.values():
        await engine.close()


def fresh() -> str:
    """A salt that nobody has used: the prefix caches of both engines hold nothing under it."""
    return secrets.token_hex(8)


async def test_every_prompt_length_around_a_page_answers_as_one_plain_engine(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    for length, (_, ids) in texts.items():
        tokens, report = await pair.answer(ids, salt=fresh())

        assert tokens == answers[length], f"{length} tokens"
        assert report is not None
        if length == 1:
            assert report.outcome is HandoffOutcome.NOTHING_MISSING
        else:
            pages = -(-(length - 1) // PAGE)
            assert (report.outcome, report.pages) == (HandoffOutcome.SHIPPED, pages), f"{length} tokens"
    assert await pair.settled()


async def test_requests_at_the_same_time_answer_as_each_alone(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    salt = fresh()
    got = await asyncio.gather(*(pair.answer(ids, salt=salt) for _, ids in texts.values()))

    assert {length: tokens for length, (tokens, _) in zip(texts, got, strict=True)} == answers
    assert await pair.settled()


async def test_a_prefix_hit_on_decode_ships_only_what_is_missing_and_answers_the_same(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    """A, B, A: the second A finds its full pages in decode's own cache."""
    length, other = 3 * PAGE + 7, 2 * PAGE
    salt = fresh()
    first, full = await pair.answer(texts[length][1], salt=salt)
    await pair.answer(texts[other][1], salt=salt)
    second, rest = await pair.answer(texts[length][1], salt=salt)

    assert first == second == answers[length]
    assert full is not None
    assert rest is not None
    assert (full.pages, rest.pages) == (4, 1)


async def test_another_requests_pages_would_change_the_answer(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    """The proof that equality above can fail: the sender ships pages of an earlier transfer."""
    length, other = 3 * PAGE + 7, 2 * PAGE
    await pair.answer(texts[other][1], salt=fresh())
    wrong, report = await pair.answer(
        texts[length][1], salt=fresh(), transfer_id=WRONG + secrets.token_hex(15)
    )

    assert report is not None
    assert report.outcome is HandoffOutcome.SHIPPED
    assert wrong != answers[length]


async def test_a_used_ticket_yields_no_pages_and_the_right_answer_all_the_same(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    """The parameters of A, replayed for C after A's pages went to others, must not answer as A."""
    transfer_id = "00" + secrets.token_hex(15)
    await pair.answer(texts[2 * PAGE][1], transfer_id=transfer_id, salt=fresh())
    await pair.answer(texts[2 * PAGE + 1][1], salt=fresh())

    length = 3 * PAGE + 7
    tokens, report = await pair.fetch(texts[length][1], transfer_id, salt=fresh())

    assert tokens == answers[length]
    assert report is not None
    assert report.outcome is HandoffOutcome.RECOMPUTED
    assert report.cause is TransferCause.UNKNOWN_TRANSFER
    assert await pair.settled(within_s=20)


async def test_aborting_decode_while_it_waits_for_pages_frees_both_engines(pair: Pair, texts: Texts) -> None:
    ids = texts[3 * PAGE + 7][1]
    waiting = asyncio.create_task(pair.fetch(ids, "00" + secrets.token_hex(15), salt=fresh()))
    for _ in range(200):
        if (await pair.decode.gauges()).in_flight_transfers:
            break
        await asyncio.sleep(0.05)

    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await pair.settled(within_s=20)


async def test_pages_that_nobody_fetches_are_freed_at_the_deadline(pair: Pair, texts: Texts) -> None:
    await pair.compute(texts[2 * PAGE][1], "00" + secrets.token_hex(15), salt=fresh(), deadline_s=2.0)

    assert await pair.settled()


async def test_a_seeded_request_whose_pages_never_come_does_not_kill_the_engine(
    pair: Pair, texts: Texts
) -> None:
    """The engine dies when a seeded prompt is computed in pieces: decode must compute it in one."""
    request = DecodeRequest(
        request_id=secrets.token_hex(16),
        attempt=1,
        token_ids=tuple(texts[3 * PAGE + 7][1] * 12),
        cache_salt=fresh(),
        sampling=Sampling(max_tokens=3, temperature=0.7, seed=7),
        stop_token_ids=(),
        gateway_id="test",
        bus_address="",
        deadline_s=120.0,
    )

    tokens = [t async for delta in pair.decode.decode(request, None) for t in delta.token_ids]

    assert len(tokens) == 3


async def test_token_ids_outside_the_vocabulary_are_refused_and_the_engine_lives(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    with pytest.raises(EngineFault):
        await pair.fetch([10**6], "00" + secrets.token_hex(15))

    tokens, _ = await pair.answer(texts[PAGE][1], salt=fresh())

    assert tokens == answers[PAGE]


async def test_every_step_of_both_engines_was_checked_and_no_page_was_wrong(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    length = 2 * PAGE + 1
    tokens, _ = await pair.answer(texts[length][1], salt=fresh())
    gauges = [await engine.gauges() for engine in (pair.prefill, pair.decode)]

    assert tokens == answers[length]
    assert all(g.steps_checked > 0 and g.pages_checked > 0 for g in gauges)
    assert [(g.steps_unchecked, g.mismatches) for g in gauges] == [(0, {})] * 2


async def test_a_ticket_of_an_earlier_start_of_prefill_is_refused_at_once_and_answered_right(
    pair: Pair, texts: Texts, answers: Answers
) -> None:
    length = 2 * PAGE + 1
    earlier = replace(pair, prefill_id="0" * 32)
    tokens, report = await earlier.fetch(texts[length][1], "00" + secrets.token_hex(15), salt=fresh())

    assert tokens == answers[length]
    assert report is not None
    assert report.cause is TransferCause.STALE_TRANSFER
    await pair.answer(texts[length][1], salt=fresh())  # prefill tells what it has counted with its steps
    assert (await pair.prefill.gauges()).mismatches == {IntegrityCause.STALE_TRANSFER: 1}
    assert await pair.settled()
