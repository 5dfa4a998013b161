"""What is remembered of finished requests: figures and places, no text."""

from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any, Final

KEPT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    request_id: str
    label: str
    """The client's, or the proxy's, `x-request-id`: the answer carries it."""
    trace_id: str
    """In hex; empty when nobody traces."""
    sampled: bool
    """Whether the trace was kept."""
    status: str
    """`finished`, `client_gone`, or the word of the error that ended it."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    attempts: int
    refetches: int
    """Gaps on the token bus that were filled."""
    prefill_replica: str | None
    decode_replica: str | None
    handoff: str | None
    """Outcome of the transfer; None when there was none."""
    pages: int
    wire_bytes: int
    ttft_s: float | None
    engine_ttft_s: float | None
    """The part of it that decode's engine took, from its call to its first token."""
    seconds: float
    tokens_per_s: float | None
    """Of the tokens after the first one."""


def rate(tokens: int, ttft_s: float | None, seconds: float) -> float | None:
    """Tokens a second after the first one; None where there is no second."""
    if ttft_s is None or tokens < 2 or seconds <= ttft_s:
        return None
    return (tokens - 1) / (seconds - ttft_s)


class Summaries:
    """The last `KEPT` finished requests."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, RequestSummary] = OrderedDict()

    def add(self, summary: RequestSummary) -> None:
        self._by_id[summary.request_id] = summary
        if len(self._by_id) > KEPT:
            self._by_id.popitem(last=False)

    def get(self, name: str) -> dict[str, Any] | None:
        """By request id, else the latest one with this label."""
        summary = self._by_id.get(name)
        if summary is None:
            summary = next((s for s in reversed(self._by_id.values()) if s.label == name), None)
        return None if summary is None else asdict(summary)
