"""A renderer without vLLM: one token a byte, and a tokenizer that detokenises them."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.errors import ContextOverflow
from gateway.prompt.derender import TokenTexts
from gateway.prompt.render import Message

HOPELESS = 100
"""Contexts: a longer text is refused without counting."""
END = 256
"""The token that ends an answer. It has no text."""


def byte_tokenizer() -> Tokenizer:
    """Token `i` is byte `i`: multi-byte characters take several tokens."""
    from tokenizers import AddedToken

    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[i]: i for i in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte, as byte-level tokenizers use them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(i) if i in plain else chr(next(others)) for i in range(256)]


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


class ByteRenderer:
    vocabulary_size = 257
    stop_token_ids = (END,)

    def __init__(self, context_length: int = 200) -> None:
        self.context_length = context_length
        self._texts = TokenTexts(byte_tokenizer())

    async def render_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return await self.render_text("".join(f"{m['role']}:{_text(m['content'])}\n" for m in messages))

    async def render_text(self, text: str) -> tuple[int, ...]:
        if len(text) > HOPELESS * self.context_length:
            raise ContextOverflow.of(len(text), 1, self.context_length)
        return tokens_of(text)

    def texts(self) -> TokenTexts:
        return self._texts


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
