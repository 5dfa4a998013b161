"""What an engine's step asks of a ledger, and the ledger that knows nothing."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kv_transfer.api.integrity import (
    LEDGER_CHECKS,
    NOTHING_CHECKED,
    TABLE_CHECKS,
    Coverage,
    IntegrityCause,
    PageFault,
)
from kv_transfer.integrity.delta import LedgerDelta

CHECKS: Final = LEDGER_CHECKS + TABLE_CHECKS
"""What is checked with a ledger."""


class PageLedger(Protocol):
    """What an engine's step asks of its ledger."""

    watches: bool
    """Whether the pool's changes are to be told."""
    counts: Counter[IntegrityCause]
    """Requests that were refused a page, and hashes that were refused a hit."""

    def reconcile(self, references: Callable[[int], int], held: Callable[[], Mapping[int, int]]) -> None:
        """Check the pages that changed.

        Args:
            references: how many the pool counts for a page.
            held: how many of them nobody's row explains, by page; asked only when a page does not add up.
        """

    def take_flagged(self) -> dict[str, PageFault]:
        """Requests that lost a page, or share one that they must not, since the last call."""

    def take_delta(self) -> LedgerDelta | None: ...

    def coverage(self) -> Coverage: ...


class NullLedger:
    """Knows nothing and costs nothing: no hook is installed for it."""

    watches = False

    def __init__(self) -> None:
        self.counts: Counter[IntegrityCause] = Counter()

    def reconcile(self, references: Callable[[int], int], held: Callable[[], Mapping[int, int]]) -> None:
        return

    def take_flagged(self) -> dict[str, PageFault]:
        return {}

    def take_delta(self) -> LedgerDelta | None:
        return None

    def coverage(self) -> Coverage:
        return NOTHING_CHECKED
