"""Prefill caches in float32, decode in BF16: what is shipped is converted, and answered with."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from tests.conftest import Answers, Texts
from tests.support.engine_pair import WRONG, EnginePair, engine_pair, fresh
from tests.support.prompts import PAGE

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(
        torch.cpu._is_amx_tile_supported(),
        reason="with AMX vLLM orders BF16 pages otherwise than float32 pages: such a pair ships none",
    ),
]

PAGE_BYTES = 30 * 3 * PAGE * 128 * 2
"""Layers, heads, slots, K and V elements, bytes of a BF16."""


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pair(model_dir: Path) -> AsyncIterator[EnginePair]:
    async with engine_pair(model_dir, dtype="bfloat16", kv_format="bf16") as pair:
        yield pair


@pytest.mark.timeout(600)
async def test_converted_pages_are_half_as_many_bytes_and_answer_nearly_as_float32(
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    """Decode computes in BF16: a near tie may go the other way, once."""
    first = await pair.first_tokens_of_shipped(texts, page_bytes=PAGE_BYTES)
    same = sum(token == answers[length][0] for length, token in first.items())

    assert same >= len(first) - 1
    assert await pair.settled()


async def test_another_requests_converted_pages_would_change_the_answer(
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    length = 3 * PAGE + 7
    await pair.answer(texts[2 * PAGE][1], salt=fresh(), max_tokens=1)
    wrong, _ = await pair.answer(
        texts[length][1], salt=fresh(), max_tokens=4, transfer_id=WRONG + secrets.token_hex(15)
    )

    assert wrong != answers[length][:4]
