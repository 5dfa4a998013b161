"""What the client saw of one request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """Times are seconds of one monotonic clock."""

    due_s: float
    sent_s: float
    chunk_s: tuple[float, ...]
    """Arrival of each chunk that carried text."""
    end_s: float = 0.0
    """When the stream was complete."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    text: str = ""
    request_id: str = ""
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def late_s(self) -> float:
        """How long the client itself took to get the request out."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """From when the request was *due*: a slow client counts against the result, not for it."""
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.chunk_s, self.chunk_s[1:], strict=False)]

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first one; None when there are none, or all came at once."""
        spent = self.chunk_s[-1] - self.chunk_s[0]
        return (self.output_tokens - 1) / spent if self.output_tokens > 1 and spent > 0 else None


def failure(due_s: float, sent_s: float, error: str) -> Record:
    return Record(due_s=due_s, sent_s=sent_s, chunk_s=(), error=error)
