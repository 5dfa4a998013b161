"""Why a page was not the one that a request was given, and what is checked. Values: they cross processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec

INTEGRITY_KEY: Final = "phasegate_integrity"
"""Key inside vLLM's `kv_transfer_params`, in what an engine answers last."""


class IntegrityCause(StrEnum):
    """Also the metric label `cause`."""

    REALLOCATED = "reallocated"  # the page belongs to a later allocation
    FREED = "freed"  # nobody owns the page
    DOUBLE_ASSIGNED = "double_assigned"  # the page was given to two requests, or its references do not add up
    STALE_PREFIX = "stale_prefix"  # the page no longer holds, or never held, what its hash promises
    FOREIGN_DOMAIN = "foreign_domain"  # the hash was bound by another tenant
    SHIFTED = "shifted"  # the right request, the wrong logical place
    UNEXPECTED_WRITE = "unexpected_write"
    ZERO_TARGET = "zero_target"  # a page that is not fresh would have been cleared
    COW_SOURCE = "cow_source"  # a page would have been copied from, or to, the wrong place
    STALE_TRANSFER = "stale_transfer"  # the pages changed hands while they were on their way
    PAYLOAD_CHECKSUM = "payload_checksum"
    NONFINITE_SOURCE = "nonfinite_source"  # NaN or Inf in what is to be converted


class PageIntegrityError(Exception):
    """A request was about to use a page that is not its own. `expected` and `found` are tags; 0: none."""

    def __init__(self, cause: IntegrityCause, page: int, expected: int, found: int) -> None:
        super().__init__(cause, page, expected, found)
        self.cause = cause
        self.page = page
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return f"{self.cause}: page {self.page} has tag {self.found:#x}, expected {self.expected:#x}"


@dataclass(frozen=True, slots=True)
class PageFault:
    """The same as a value."""

    cause: IntegrityCause
    page: int
    """The page that was about to be used, -1 when there was none."""
    expected: int
    """Tag; 0: none."""
    found: int
    """Tag; 0: none."""

    def to_params(self) -> dict[str, Any]:
        return {INTEGRITY_KEY: msgspec.to_builtins(self)}

    @staticmethod
    def from_params(params: Mapping[str, Any] | None) -> "PageFault | None":
        """The fault in what an engine answered, or None."""
        raw = (params or {}).get(INTEGRITY_KEY)
        return None if raw is None else msgspec.convert(raw, PageFault)

    def error(self) -> PageIntegrityError:
        return PageIntegrityError(self.cause, self.page, self.expected, self.found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What stands between a wrong page and an answer."""

    ledger: Literal["generation", "null"]
    checked: tuple[str, ...]
    """Of `LEDGER_CHECKS` and `TABLE_CHECKS`."""
    unchecked: tuple[str, ...]


LEDGER_CHECKS: Final = ("page owners", "references", "prefix hits")
"""Beside the scheduler, on every device."""
TABLE_CHECKS: Final = ("block tables", "writes", "zeroing", "copies", "received pages")
"""Beside the model, where its tables can be read before the forward."""
NOTHING_CHECKED: Final = Coverage(ledger="null", checked=(), unchecked=LEDGER_CHECKS + TABLE_CHECKS)
