"""From messages to token ids, by vLLM's own renderer in this process. No engine, no weights."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from gateway.errors import ContextOverflow, InvalidRequest
from gateway.prompt.derender import TokenTexts

log = logging.getLogger(__name__)

Message = dict[str, Any]
"""`{"role", "content"}`, validated; content is a string or a list of text parts."""


class Renderer(Protocol):
    context_length: int
    vocabulary_size: int
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer."""

    async def render_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the conversation in the model's template, ready for the answer to follow.

        Raises:
            ContextOverflow: it is certain without counting that it does not fit. Names no field.
            InvalidRequest: the model's template refuses the conversation.
        """

    async def render_text(self, text: str) -> tuple[int, ...]:
        """Token ids of bare text, without a template. Raises `ContextOverflow` likewise."""

    def texts(self) -> TokenTexts:
        """For detokenising: one for all answers."""


class VllmRenderer:
    """Tokenising runs in vLLM's own threads: the event loop is not held up by a long prompt."""

    def __init__(self, model_dir: str, context_length: int) -> None:
        """Takes seconds: imports vLLM. `context_length` may be shorter than the model's."""
        from vllm import AsyncEngineArgs
        from vllm.renderers import renderer_from_config

        args = AsyncEngineArgs(model=model_dir, max_model_len=context_length, enforce_eager=True)
        config = args.create_engine_config()
        self._renderer = renderer_from_config(config)
        self._tokenizer = self._renderer.tokenizer
        self._texts = TokenTexts(self._tokenizer.backend_tokenizer)
        self._longest_token = int(self._tokenizer.max_chars_per_token)
        self.context_length = context_length
        self.vocabulary_size = int(config.model_config.get_vocab_size())
        generation = config.model_config.try_get_generation_config()
        self.stop_token_ids = _stop_tokens(generation.get("eos_token_id"), self._tokenizer.eos_token_id)

    async def render_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        from vllm.renderers import ChatParams

        self._refuse_hopeless(sum(_characters(message["content"]) for message in messages))
        params = ChatParams(
            chat_template_kwargs={"add_generation_prompt": True, "continue_final_message": False}
        )
        try:
            _, (prompt,) = await self._renderer.render_chat_async([list(messages)], params, self._counting())
        except (ValueError, TypeError) as refusal:
            # The template's own words may repeat the conversation: they stay here.
            log.info("prompt.refused reason=%s", type(refusal).__name__)
            raise InvalidRequest(
                "AiError: Bad input: Error: '/messages' is refused by the model's chat template", "messages"
            ) from None
        return tuple(prompt["prompt_token_ids"])

    async def render_text(self, text: str) -> tuple[int, ...]:
        self._refuse_hopeless(len(text))
        (prompt,) = await self._renderer.render_cmpl_async([{"prompt": text}], self._counting())
        return tuple(prompt["prompt_token_ids"])

    def texts(self) -> TokenTexts:
        return self._texts

    def _counting(self) -> Any:
        """Tokenise all of it: an error that names how long the prompt is needs the whole count."""
        from vllm.renderers import TokenizeParams

        return TokenizeParams(max_total_tokens=None)

    def _refuse_hopeless(self, characters: int) -> None:
        """Refuse before tokenising what is too long even if every token were the longest there is."""
        at_least = -(-characters // self._longest_token)
        if at_least > self.context_length:
            raise ContextOverflow.of(at_least, 1, self.context_length)


def _characters(content: str | list[dict[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


def _stop_tokens(*sources: int | list[int] | None) -> tuple[int, ...]:
    found: set[int] = set()
    for source in sources:
        if source is not None:
            found.update([source] if isinstance(source, int) else source)
    return tuple(sorted(found))
