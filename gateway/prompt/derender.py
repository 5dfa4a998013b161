"""From token ids to text that may be sent: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream


class TokenTexts:
    """Texts of tokens that end with a whole character, learnt from the answers of one tokenizer.

    In a byte-level vocabulary the text of such tokens in a row is their texts in a row, so that a token seen
    once need not be decoded again. Others change a token's text with its place: of those nothing is learnt.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        from tokenizers.decoders import ByteLevel

        self.tokenizer = tokenizer
        self.additive = isinstance(tokenizer.decoder, ByteLevel)
        """Text between two whole characters does not depend on what was before."""
        self._known: dict[int, str] = {}
        self.get = self._known.get
        """The text of a token, None while it is not known to have one of its own."""

    def learn(self, token_id: int, text: str) -> None:
        """This is what the token became between two characters; empty if it is not the end of one."""
        if self.additive and text:
            self._known[token_id] = text


class Detokeniser:
    """Text of one answer, token by token. A character of several tokens comes out with its last one."""

    def __init__(self, texts: TokenTexts) -> None:
        from tokenizers.decoders import DecodeStream

        self._texts = texts
        self._new_stream = DecodeStream
        self._stream: DecodeStream | None = None
        """Holds the tokens of a character that is not complete; None between characters."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty inside a character and for special tokens."""
        if self._stream is not None:
            return self._decoded(self._stream, token_id)
        text = self._texts.get(token_id)
        if text is None:
            text = self._decoded(self._new_stream(skip_special_tokens=True), token_id)
            self._texts.learn(token_id, text)
        return text

    def _decoded(self, stream: "DecodeStream", token_id: int) -> str:
        try:
            text = stream.step(self._texts.tokenizer, token_id) or ""
        except Exception as error:
            # Bytes that never become a character leave the stream in a state it refuses to go on from. The
            # library has no type of its own for this. The lost bytes had no text.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            stream = self._new_stream(skip_special_tokens=True)
            text = stream.step(self._texts.tokenizer, token_id) or ""
        self._stream = None if text and self._texts.additive else stream
        return text


@dataclass(frozen=True, slots=True)
class Found:
    text: str
    """What may be sent now."""
    stopped: bool
    """A stop string is complete: `text` ends before it, and nothing follows."""


class StopFinder:
    """Cuts text at the first complete stop string, and holds back what could be the start of one.

    "First" is by where a string is complete, then by where it starts: the answer ends with the token that
    completes a stop string, whatever a longer one could still become.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    @property
    def idle(self) -> bool:
        """There is nothing to find: text may pass it by."""
        return not self._stops

    def push(self, text: str) -> Found:
        if not self._stops:
            return Found(text, stopped=False)
        window = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := window.find(stop)) >= 0]
        if ends:
            _, start = min(ends)
            self._held = ""
            return Found(window[:start], stopped=True)
        keep = self._partial(window)
        self._held = window[len(window) - keep :]
        return Found(window[: len(window) - keep], stopped=False)

    def flush(self) -> str:
        """The text held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _partial(self, window: str) -> int:
        """Length of the longest end of `window` that begins a stop string."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[len(window) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
