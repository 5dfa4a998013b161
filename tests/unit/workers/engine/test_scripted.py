"""The scripted engine's pace, answers and vocabulary."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.api import HandoffOutcome, HandoffReport, Role, Ticket
from tests.support.replicas import PROFILE, a_decode, a_prefill, settle
from workers.api import FaultKind, Phase, Sampling
from workers.engine.base import Delta, EngineFault
from workers.engine.scripted import ScriptedEngine, answer, duration_s, read_vocabulary
from workers.engine.scripted_batch import Work
from workers.engine.scripted_pages import Pages
from workers.profile.schema import Script, parse_profile

WORDS = tuple(range(100, 200))
SCRIPT = {"pages": 64, "base_ms": 20, "per_sequence_ms": 1, "per_prefill_token_ms": 0.5}


class Clock:
    """Seconds that pass only while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 50.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 6))
        self.seconds += seconds
        await settle()


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_loaded() -> None:
    """That takes seconds, which belong to no test."""
    Pages(1, 16)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    words = {
        f"Ġ{a}{b}": 100 + 10 * n + m for n, a in enumerate("abcdefghij") for m, b in enumerate("abcdefghij")
    }
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": words | {"<|im_end|>": 2, "Ġ": 3, "Ã©": 4, "!!": 5}}})
    )
    return tmp_path


async def an_engine(model: Path, clock: Clock, phase: Phase = Phase.DECODE) -> ScriptedEngine:
    raw: dict[str, Any] = PROFILE | {"engine": "scripted"}
    for name in ("prefill", "decode"):
        raw[name] = {"max_sequences": 4, "script": SCRIPT}
    profile = parse_profile(raw, source="test")
    engine = ScriptedEngine(profile, phase, model_dir=str(model), now=clock.now, sleep=clock.sleep)
    await engine.start()
    return engine


async def all_of(engine: ScriptedEngine, ticket: Ticket | None = None, **changes: Any) -> list[Delta]:
    return [delta async for delta in engine.decode(a_decode(**changes), ticket)]


def test_a_step_takes_what_the_profile_says() -> None:
    assert duration_s(Script(**SCRIPT), Work(sequences=3, prefill_tokens=10)) == pytest.approx(0.028)


async def test_steps_follow_each_other_at_the_pace_of_the_profile(model: Path) -> None:
    clock = Clock()
    engine = await an_engine(model, clock)

    deltas = await all_of(engine, token_ids=tuple(range(10, 20)), sampling=Sampling(max_tokens=3))
    await engine.close()

    assert clock.slept == [0.026, 0.021, 0.021]
    assert [delta.ending is not None for delta in deltas] == [False, False, True]


async def test_a_late_step_is_not_waited_for_again(model: Path) -> None:
    clock = Clock()
    engine = await an_engine(model, clock)
    async for _ in engine.decode(a_decode(sampling=Sampling(max_tokens=4)), None):
        clock.seconds += 0.005
    await engine.close()

    assert clock.slept[2:] == [0.016, 0.016]  # the second step had begun before anybody was late


def test_answers_depend_on_the_prompt_and_on_a_seed_that_matters() -> None:
    def first(prompt: tuple[int, ...], **sampling: Any) -> list[int]:
        return list(islice(answer(WORDS, prompt, Sampling(max_tokens=9, **sampling)), 9))

    assert first((1, 2)) == first((1, 2))
    assert first((1, 2)) != first((2, 1))
    assert first((1, 2), seed=1) != first((1, 2), seed=2)
    assert first((1, 2), seed=1, temperature=0.0) == first((1, 2), seed=2, temperature=0.0)
    assert set(first((1, 2))) <= set(WORDS)


def test_answers_are_made_of_words_of_the_vocabulary(model: Path) -> None:
    found = read_vocabulary(model)

    assert found.size == 5000
    assert found.words == WORDS


async def test_a_model_without_a_tokenizer_does_not_start(model: Path) -> None:
    (model / "tokenizer.json").unlink()

    with pytest.raises(EngineFault, match="no vocabulary"):
        await an_engine(model, Clock())


async def test_no_transfer_is_reported_where_nothing_was_moved(model: Path) -> None:
    engine = await an_engine(model, Clock())
    ticket = Ticket(transfer_id="ab" * 16, role=Role.RECEIVE, peer_engine="p1")
    prompt = {"token_ids": tuple(range(10, 27)), "sampling": Sampling(max_tokens=1)}

    reports = []
    for each in (None, ticket, ticket):
        ending = (await all_of(engine, each, **prompt))[-1].ending
        assert ending is not None
        reports.append((ending.handoff, ending.cached_tokens))
        engine_free = (await engine.gauges()).free_pages
        assert engine_free == 64
    await engine.close()

    hit = HandoffReport(outcome=HandoffOutcome.NOTHING_MISSING)
    assert reports == [(None, 0), (hit, 16), (hit, 16)]


async def test_prefill_says_what_its_cache_had(model: Path) -> None:
    engine = await an_engine(model, Clock(), Phase.PREFILL)
    request = a_prefill(token_ids=tuple(range(10, 60)))
    ticket = Ticket(transfer_id="ab" * 16, role=Role.SEND, peer_engine="d1")

    cached = [(await engine.prefill(request, ticket)).cached_tokens for _ in range(2)]
    await engine.close()

    assert cached == [0, 48]


async def test_a_step_loop_that_fails_ends_every_request_and_the_engine_is_dead(model: Path) -> None:
    class Broken(Clock):
        async def sleep(self, seconds: float) -> None:
            raise RuntimeError("no sleep")

    engine = await an_engine(model, Broken())

    with pytest.raises(EngineFault) as caught:
        await all_of(engine)

    assert caught.value.kind is FaultKind.ENGINE_DEAD
    assert engine.dead
    with pytest.raises(EngineFault):
        await engine.gauges()
    await engine.close()


async def test_tokens_made_before_the_engine_ended_come_and_then_the_fault(model: Path) -> None:
    engine = await an_engine(model, Clock())
    answers = engine.decode(a_decode(sampling=Sampling(max_tokens=1000)), None)
    first = await anext(answers)
    await settle()  # more tokens come, which nobody takes yet
    await engine.close()

    rest: list[int] = []

    async def read_on() -> None:
        async for delta in answers:
            rest.extend(delta.token_ids)

    with pytest.raises(EngineFault):
        await read_on()
    assert len(first.token_ids) == 1
    assert rest
