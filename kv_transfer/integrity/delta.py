"""What changed in the ledger since the last step, for those who check tables against it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class RowGrowth:
    """Pages `start ...` of a request in one cache group; with start 0 the row is new."""

    request_id: str
    group: int
    start: int
    pages: list[int]
    """Page numbers; the null page where attention will never look."""
    tags: list[int]
    """0 beside the null page."""
    own: list[bool]
    """Whether the request may write to the page."""


@dataclass(frozen=True, slots=True)
class RowSkip:
    """Entries `start ... end - 1` fell out of the window."""

    request_id: str
    group: int
    start: int
    end: int


@dataclass(slots=True)
class LedgerDelta:
    """Apply in this order: a page changes its tag after those who gave it back have dropped it."""

    dropped: list[str] = field(default_factory=list)
    skipped: list[RowSkip] = field(default_factory=list)
    tags: dict[int, int] = field(default_factory=dict)
    grown: list[RowGrowth] = field(default_factory=list)
