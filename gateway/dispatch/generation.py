"""One answer as text: a call's tokens, detokenised, cut at stop strings."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from gateway.dispatch.driver import Call
from gateway.prompt.derender import Detokeniser, StopFinder, TokenTexts
from workers.api import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generation:
    """Iterate `pieces` once; `finish_reason` and `usage` hold when it has returned."""

    def __init__(self, call: Call, texts: TokenTexts, stops: Sequence[str], prompt_tokens: int) -> None:
        self._call = call
        self._detokeniser = Detokeniser(texts)
        self._finder = StopFinder(stops)
        self._prompt_tokens = prompt_tokens

    async def pieces(self) -> AsyncGenerator[str]:
        """Text that may be sent, never empty. Raises the `ApiError` that ended the request."""
        while token_ids := await self._call.take():
            text, stopped = self._text_of(token_ids)
            if text:
                yield text
            if stopped:
                return
        if tail := self._finder.flush():
            yield tail

    def _text_of(self, token_ids: tuple[int, ...]) -> tuple[str, bool]:
        """Text of these tokens; True if one of them completed a stop string."""
        if self._finder.idle:
            return "".join(map(self._detokeniser.push, token_ids)), False
        ready: list[str] = []
        for place, token_id in enumerate(token_ids, start=1):
            found = self._finder.push(self._detokeniser.push(token_id))
            ready.append(found.text)
            if found.stopped:
                self._call.stop(unused_tokens=len(token_ids) - place)
                return "".join(ready), True
        return "".join(ready), False

    @property
    def finish_reason(self) -> FinishReason:
        return self._call.finish_reason

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._call.billed_tokens,
            cached_tokens=self._call.cached_tokens,
        )
