"""What pools may expect of any engine: the tests' double, the scripted one and the real one."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from kv_transfer.api import Contract
from tests.support.engines import ScriptedEngine as EngineDouble
from tests.support.members import MEMBERSHIP
from tests.support.replicas import a_decode
from workers.api import DecodeRequest, FaultKind, FinishReason, Phase, Sampling
from workers.engine.base import Delta, Engine, EngineFault
from workers.engine.scripted import ScriptedEngine
from workers.engine.vllm_engine import VllmEngine
from workers.profile.schema import ModelProfile, parse_profile

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODELS = Path(__file__).parents[2] / "deploy" / "models"
PROMPT = tuple(range(1000, 1100))
ANSWER = (288, 325, 476)
"""How the model begins its greedy answer to PROMPT, and what the double says."""


def profile(name: str) -> ModelProfile:
    return parse_profile(yaml.safe_load((MODELS / f"{name}.yaml").read_text()), source=name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(model_dir: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(
        profile("exact"),
        Phase.DECODE,
        model_dir=str(model_dir),
        engine_id=secrets.token_hex(16),
        host="127.0.0.1",
        device="cpu",
        contract=Contract(),
        membership=MEMBERSHIP,
        faults={},
    )
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted(model_dir: Path) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(profile("scripted"), Phase.DECODE, model_dir=str(model_dir))
    await engine.start()
    yield engine
    await engine.close()


REAL = [pytest.param("scripted", marks=pytest.mark.vllm), pytest.param("vllm", marks=pytest.mark.vllm)]
"""Both need the prepared model: for the scripted one, its tokenizer."""


@pytest.fixture(params=["double", *REAL])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "double":
        return EngineDouble(steps=tuple((token,) for token in ANSWER), finish=FinishReason.LENGTH)
    real: Engine = request.getfixturevalue(request.param)
    return real


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


async def answer(engine: Engine, request: DecodeRequest) -> list[Delta]:
    return [delta async for delta in engine.decode(request, None)]


def tokens(deltas: list[Delta]) -> tuple[int, ...]:
    return tuple(token for delta in deltas for token in delta.token_ids)


async def until_idle(engine: Engine) -> None:
    async with asyncio.timeout(10):
        while (await engine.gauges()).running:  # noqa: ASYNC110 - gauges are asked, they do not call
            await asyncio.sleep(0.01)


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)


async def test_the_last_delta_and_no_other_has_an_ending(engine: Engine) -> None:
    deltas = await answer(engine, a_decode(token_ids=PROMPT, sampling=greedy(3)))

    assert len(tokens(deltas)) == 3
    if not isinstance(engine, ScriptedEngine):
        assert tokens(deltas) == ANSWER
    assert all(delta.ending is None for delta in deltas[:-1])
    assert deltas[-1].ending is not None
    assert deltas[-1].ending.reason is FinishReason.LENGTH
    assert deltas[-1].ending.handoff is None


async def test_closing_the_answer_early_frees_the_engine(engine: Engine) -> None:
    request = a_decode("left", token_ids=PROMPT, sampling=greedy(2000))
    async with aclosing(engine.decode(request, None)) as deltas:
        async for _ in deltas:
            break

    await until_idle(engine)
    gauges = await engine.gauges()
    assert gauges.waiting == 0
    assert not engine.dead


async def test_a_greedy_answer_comes_again_and_a_stop_token_ends_it_as_its_last_token(real: Engine) -> None:
    usual = tokens(await answer(real, a_decode("usual", token_ids=PROMPT, sampling=greedy(3))))
    request = a_decode("stop", token_ids=PROMPT, sampling=greedy(50), stop_token_ids=(usual[1],))

    deltas = await answer(real, request)

    assert tokens(deltas) == usual[:2]
    assert deltas[-1].ending is not None
    assert deltas[-1].ending.reason is FinishReason.STOP


async def test_a_second_prompt_with_the_same_salt_hits_the_cache_and_with_another_does_not(
    real: Engine,
) -> None:
    async def cached(salt: str) -> int:
        prompt = tuple(range(2000, 2100))
        request = a_decode(secrets.token_hex(4), token_ids=prompt, sampling=greedy(1), cache_salt=salt)
        ending = (await answer(real, request))[-1].ending
        assert ending is not None
        return ending.cached_tokens

    assert [await cached("one"), await cached("one"), await cached("two")] == [0, 96, 0]


@pytest.mark.parametrize(
    "token_ids", [(), (-1,), (10**6,), (5,) * 9000], ids=["empty", "negative", "outside", "too long"]
)
async def test_a_prompt_that_cannot_run_is_refused_and_the_engine_lives(
    real: Engine, token_ids: tuple[int, ...]
) -> None:
    with pytest.raises(EngineFault) as caught:
        await answer(real, a_decode("bad", token_ids=token_ids))

    assert caught.value.kind is FaultKind.INVALID_REQUEST
    await until_idle(real)
    assert not real.dead


@pytest.mark.vllm
@pytest.mark.long
async def test_a_seeded_request_with_a_prompt_longer_than_a_usual_step_does_not_kill_the_engine(
    vllm: VllmEngine,
) -> None:
    request = a_decode("seed", token_ids=(7,) * 2500, sampling=Sampling(max_tokens=2, seed=3))

    assert (await answer(vllm, request))[-1].ending is not None
    assert not vllm.dead


@pytest.mark.vllm
async def test_a_scripted_engine_that_is_closed_fails_what_is_inside_and_answers_no_gauges(
    model_dir: Path,
) -> None:
    engine = ScriptedEngine(profile("scripted"), Phase.DECODE, model_dir=str(model_dir))
    await engine.start()
    deltas = engine.decode(a_decode(token_ids=PROMPT, sampling=greedy(1000)), None)
    await anext(deltas)

    await engine.close()

    with pytest.raises(EngineFault) as caught:
        [delta async for delta in deltas]
    assert caught.value.kind is FaultKind.ENGINE_DEAD
    with pytest.raises(EngineFault):
        await engine.gauges()
