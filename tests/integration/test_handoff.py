"""Two real engines and the real connector between them, without Ray or HTTP: token ids are compared."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kv_transfer.api import HandoffOutcome, IntegrityCause, TransferCause
from tests.conftest import Answers, Texts
from tests.support.engine_pair import WRONG, EnginePair, engine_pair, fresh
from tests.support.prompts import PAGE
from workers.api import DecodeRequest, Sampling
from workers.engine.base import EngineFault

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pair(model_dir: Path) -> AsyncIterator[EnginePair]:
    async with engine_pair(model_dir) as pair:
        yield pair


async def test_every_prompt_length_around_a_page_answers_as_one_plain_engine(
    pair: EnginePair, texts: Texts, answers: Answers
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
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    salt = fresh()
    got = await asyncio.gather(*(pair.answer(ids, salt=salt) for _, ids in texts.values()))

    assert {length: tokens for length, (tokens, _) in zip(texts, got, strict=True)} == answers
    assert await pair.settled()


async def test_a_prefix_hit_on_decode_ships_only_what_is_missing_and_answers_the_same(
    pair: EnginePair, texts: Texts, answers: Answers
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
    pair: EnginePair, texts: Texts, answers: Answers
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
    pair: EnginePair, texts: Texts, answers: Answers
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


async def test_aborting_decode_while_it_waits_for_pages_frees_both_engines(
    pair: EnginePair, texts: Texts
) -> None:
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


async def test_pages_that_nobody_fetches_are_freed_at_the_deadline(pair: EnginePair, texts: Texts) -> None:
    await pair.compute(texts[2 * PAGE][1], "00" + secrets.token_hex(15), salt=fresh(), deadline_s=2.0)

    assert await pair.settled()


async def test_a_seeded_request_whose_pages_never_come_does_not_kill_the_engine(
    pair: EnginePair, texts: Texts
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
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    with pytest.raises(EngineFault):
        await pair.fetch([10**6], "00" + secrets.token_hex(15))

    tokens, _ = await pair.answer(texts[PAGE][1], salt=fresh())

    assert tokens == answers[PAGE]


async def test_every_step_of_both_engines_was_checked_and_no_page_was_wrong(
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    length = 2 * PAGE + 1
    tokens, _ = await pair.answer(texts[length][1], salt=fresh())
    gauges = [await engine.gauges() for engine in (pair.prefill, pair.decode)]

    assert tokens == answers[length]
    assert all(g.steps_checked > 0 and g.pages_checked > 0 for g in gauges)
    assert [(g.steps_unchecked, g.mismatches) for g in gauges] == [(0, {})] * 2


async def test_a_ticket_of_an_earlier_start_of_prefill_is_refused_at_once_and_answered_right(
    pair: EnginePair, texts: Texts, answers: Answers
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
