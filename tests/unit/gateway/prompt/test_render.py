"""The real renderer, on the embedded model's tokenizer and template."""

from pathlib import Path

import pytest

from gateway.errors import ContextOverflow
from gateway.prompt.derender import Detokeniser
from gateway.prompt.render import VllmRenderer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def renderer(model_dir: Path) -> VllmRenderer:
    return VllmRenderer(str(model_dir), context_length=512)


def text_of(renderer: VllmRenderer, token_ids: tuple[int, ...]) -> str:
    return renderer.texts().tokenizer.decode(list(token_ids), skip_special_tokens=False)


async def test_conversation_is_rendered_by_the_models_template(renderer: VllmRenderer) -> None:
    token_ids = await renderer.render_chat([{"role": "user", "content": "What is the capital of France?"}])

    assert text_of(renderer, token_ids).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_text_parts_are_one_message(renderer: VllmRenderer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

    token_ids = await renderer.render_chat([{"role": "user", "content": parts}])

    assert "<|im_start|>user\none\ntwo<|im_end|>" in text_of(renderer, token_ids)


async def test_raw_text_gets_no_template(renderer: VllmRenderer) -> None:
    assert text_of(renderer, await renderer.render_text("Once upon a time")) == "Once upon a time"


async def test_prompt_beyond_the_context_is_counted_to_the_last_token(renderer: VllmRenderer) -> None:
    """An error that says how long a prompt is must not stop counting at the limit."""
    assert len(await renderer.render_text("word " * 3000)) >= 3000


async def test_hopeless_prompt_is_refused_without_tokenising(renderer: VllmRenderer) -> None:
    with pytest.raises(ContextOverflow):
        await renderer.render_text("x" * 5_000_000)


async def test_answer_text_comes_back_whole_from_its_tokens(renderer: VllmRenderer) -> None:
    text = "naïve café 🦜 日本語"
    detokeniser = Detokeniser(renderer.texts())

    token_ids = (*await renderer.render_text(text), *renderer.stop_token_ids)

    assert "".join(map(detokeniser.push, token_ids)) == text


def test_end_of_turn_token_ends_answers(renderer: VllmRenderer) -> None:
    assert [renderer.texts().tokenizer.id_to_token(i) for i in renderer.stop_token_ids] == ["<|im_end|>"]
    assert renderer.vocabulary_size == 49_152
