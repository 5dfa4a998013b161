"""Prefill caches in float32, decode in FP8 with measured scales and rounded writes. Needs AVX-512."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kv_transfer.api import LayerScales, ScaleFile, WireFormat, encode_scale_file
from tests.conftest import Answers, Texts
from tests.support.engine_pair import EnginePair, engine_pair
from tests.support.processor import lack
from tests.support.prompts import PAGE

LAYERS = 30
PAGE_BYTES = LAYERS * 3 * PAGE * 128
SHORT = lack(
    {
        "name": "fp8",
        "model_id": "fp8",
        "weights": {"path": "/"},
        "context_length": 64,
        "decode": {"kv_format": "fp8_e4m3"},
    }
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(bool(SHORT), reason=SHORT),
]


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def pair(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnginePair]:
    """An engine that starts has tried that its writes are rounded."""
    scales = tmp_path_factory.mktemp("scales") / "scales.json"
    layers = tuple(
        LayerScales(name=f"model.layers.{i}.self_attn.attn", k=0.125, v=0.0625) for i in range(LAYERS)
    )
    file = ScaleFile(version=1, format=WireFormat.FP8_E4M3, source_revision=None, layers=layers)
    scales.write_bytes(encode_scale_file(file))
    async with engine_pair(model_dir, kv_format="fp8_e4m3", kv_scales=str(scales)) as pair:
        yield pair


@pytest.mark.timeout(600)
async def test_fp8_pages_are_a_quarter_of_the_bytes_and_answer_nearly_as_float32(
    pair: EnginePair, texts: Texts, answers: Answers
) -> None:
    first = await pair.first_tokens_of_shipped(texts, page_bytes=PAGE_BYTES)
    same = sum(token == answers[length][0] for length, token in first.items())

    assert same >= len(first) - 2
    assert await pair.settled()
