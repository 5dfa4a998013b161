"""Tokens that were put on the bus, kept so that a receiver with a gap can ask again. Pure."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

KEEP_ENDED_S: Final = 30.0
KEEP_ENDED_REQUESTS: Final = 1024


class TokenHistory:
    """All tokens of live requests; of ended ones for a while, the oldest go first."""

    def __init__(self, now: Callable[[], float], *, keep_ended: int = KEEP_ENDED_REQUESTS) -> None:
        """
        Args:
            now: monotonic seconds.
        """
        self._now = now
        self._keep_ended = keep_ended
        self._live: dict[str, list[int]] = {}
        self._ended: OrderedDict[str, tuple[float, tuple[int, ...]]] = OrderedDict()

    def begin(self, request_id: str) -> list[int]:
        """A fresh list for the request's tokens; the caller appends to it. An earlier attempt is dropped."""
        self._ended.pop(request_id, None)
        tokens: list[int] = []
        self._live[request_id] = tokens
        return tokens

    def end(self, request_id: str, tokens: list[int]) -> None:
        """Keep the tokens of a request that is over. A later attempt under the same id stays untouched."""
        if self._live.get(request_id) is not tokens:
            return
        del self._live[request_id]
        self._ended[request_id] = (self._now() + KEEP_ENDED_S, tuple(tokens))
        self._expire()

    def since(self, request_id: str, index: int) -> tuple[int, ...] | None:
        """Tokens from `index` on; None when the request is unknown or too long over."""
        self._expire()
        live = self._live.get(request_id)
        if live is not None:
            return tuple(live[index:])
        ended = self._ended.get(request_id)
        return None if ended is None else ended[1][index:]

    def _expire(self) -> None:
        now = self._now()
        while self._ended:
            until, _ = next(iter(self._ended.values()))
            if until > now and len(self._ended) <= self._keep_ended:
                return
            self._ended.popitem(last=False)
