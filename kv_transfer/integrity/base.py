"""What is asked of a ledger wherever there may be none, and the ledger that knows nothing."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from kv_transfer.api.integrity import LEDGER_CHECKS, NOTHING_CHECKED, TABLE_CHECKS, Coverage, IntegrityCause
from kv_transfer.api.ledger import LedgerSnapshot

CHECKS: Final = LEDGER_CHECKS + TABLE_CHECKS
"""What is checked with a ledger."""


class PageLedger(Protocol):
    counts: Counter[IntegrityCause]
    """Requests that were refused a page, and hashes that were refused a hit."""

    def coverage(self) -> Coverage: ...

    def tags(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Of these pages now; none where nothing is known."""

    def snapshot(self) -> LedgerSnapshot:
        """From any thread."""

    def given(self, request_id: str, pages: Sequence[int]) -> tuple[int, ...]:
        """Tags under which the request was given these pages, which are the first of its row in group 0; none
        where nothing is known."""


class NullLedger:
    """Knows nothing and costs nothing: no hook is installed for it, and no step asks it anything."""

    def __init__(self) -> None:
        self.counts: Counter[IntegrityCause] = Counter()

    def coverage(self) -> Coverage:
        return NOTHING_CHECKED

    def tags(self, pages: Iterable[int]) -> tuple[int, ...]:
        return ()

    def snapshot(self) -> LedgerSnapshot:
        return LedgerSnapshot(ledger="null")

    def given(self, request_id: str, pages: Sequence[int]) -> tuple[int, ...]:
        return ()
