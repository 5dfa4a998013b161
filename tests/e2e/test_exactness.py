"""The long form: twenty prompts from 1 to 1,500 tokens, streamed and not, alone and eight at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.conftest import ANSWER_TOKENS
from tests.e2e.test_answers import ask
from tests.support.prompts import LONG, PAGE, exact_texts
from tests.support.reference import plain_answers
from tests.support.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

Expected = dict[int, tuple[str, int]]


@pytest.fixture(scope="module")
def long_texts(model_dir: Path) -> dict[int, str]:
    return {length: text for length, (text, _) in exact_texts(model_dir, LONG).items()}


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> Expected:
    """By prompt length: one plain engine's answer as text, and its number of tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompts = {length: ids for length, (_, ids) in exact_texts(model_dir, LONG).items()}
    answers = plain_answers(model_dir, list(prompts.values()), max_tokens=ANSWER_TOKENS)
    return {
        length: (tokenizer.decode(ids, skip_special_tokens=True), len(ids))
        for length, ids in zip(prompts, answers, strict=True)
    }


def test_each_alone_then_again_streamed_after_a_prefix_hit(
    client: httpx.Client, stack: Stack, long_texts: dict[int, str], expected: Expected
) -> None:
    shipped = 0
    for stream in (False, True):
        for length, text in long_texts.items():
            answer, count, response = ask(client, stack, text, stream=stream)
            summary = stack.summary(response)

            assert (answer, count) == expected[length], f"{length} tokens, stream {stream}"
            assert summary["handoff"] != "recomputed", f"{length} tokens, stream {stream}"
            shipped += summary["pages"]

    assert shipped >= sum(length // PAGE for length in long_texts) // 2


def test_eight_at_once(
    client: httpx.Client, stack: Stack, long_texts: dict[int, str], expected: Expected
) -> None:
    """Each text follows a number of its own prefix in the cache or not: the answer may not depend on it."""
    lengths = [length for length in long_texts for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda n: ask(client, stack, long_texts[n], stream=True)[:2], lengths))

    assert [(n, *answer) for n, answer in zip(lengths, got, strict=True)] == [
        (n, *expected[n]) for n in lengths
    ]
