"""A ledger laid open: ids only, for whoever looks into a running engine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """What one request was given in one cache group, in logical order."""

    request_id: str
    group: int
    pages: tuple[int, ...]
    tags: tuple[int, ...]
    """0: attention never looks there, or the request lost the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPage:
    """A page that somebody has."""

    page: int
    tag: int
    owners: tuple[str, ...]
    """Request ids."""
    writer: str | None
    """The request that may write to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSnapshot:
    """Of an engine that goes on meanwhile: its parts may be a moment apart."""

    ledger: Literal["generation", "null"]
    rows: tuple[LedgerRow, ...] = ()
    pages: tuple[LedgerPage, ...] = ()
