"""Faults on purpose, as data. Off unless configured; refused outside `mode: dev`."""

from enum import StrEnum

import msgspec


class PageFaultKind(StrEnum):
    """What goes wrong with a page. Each one is let loose where the real thing could happen."""

    FLIP_LAST = "flip_last"  # the last entry that is read shows another request's page
    FLIP_MIDDLE = "flip_middle"
    FLIP_BEYOND = "flip_beyond"  # the entry after the last one that is read
    SHIFT_ROW = "shift_row"  # every entry shows the page of the next one
    FOREIGN_SLOT = "foreign_slot"  # a token is written into another request's page
    FREE_LIVE = "free_live"  # a page is freed while its request uses it
    DOUBLE_IN_STEP = "double_in_step"  # two requests get one new page in the same step
    DOUBLE_ACROSS = "double_across"  # a request gets, as new, a page that another has for longer
    STALE_PREFIX = "stale_prefix"  # a prefix hash leads to a page that holds something else
    FOREIGN_DOMAIN = "foreign_domain"  # a request asks for another tenant's prefix hash
    ZERO_TARGET = "zero_target"  # a page in use is cleared before the forward
    COPY_SOURCE = "copy_source"  # another request's page is copied over one in use
    STALE_EPOCH = "stale_epoch"  # a hand-off is asked for from an engine that was restarted since
    STALE_TAG = "stale_tag"  # pages of a hand-off changed hands while they were to be shipped
    CORRUPT_PAYLOAD = "corrupt_payload"  # a bit flips on the way


class FaultPhase(StrEnum):
    """What the victim is doing in the step in which the fault is let loose."""

    PREFILL = "prefill"  # its whole prompt
    CHUNK = "chunk"  # a later piece of its prompt
    DECODE = "decode"
    RESUMED = "resumed"  # anything, after it was preempted
    SEND = "send"  # its pages are shipped
    RECEIVE = "receive"  # its pages come


class PageFaultOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault, once, in the first step in which all of this holds."""

    kind: PageFaultKind
    phase: FaultPhase
    victim: str
    """Prefix of the victim's request id."""
    other: str = ""
    """Prefix of the id of the request whose page stands in; it has pages by then."""
    after_tokens: int = 0
    """Tokens of the victim that are computed before."""
    rank: int = 0
    """The tensor-parallel worker whose tables go wrong."""


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    foreign_pages: bool = False
    """The sender ships pages of an earlier transfer instead of the request's own."""
    only_transfers: str = ""
    """Prefix of the transfer ids that are affected; empty: all."""
    holds: str | None = None
    """Folder of barriers: see `kv_transfer.testing.holds`."""
    page_faults: str | None = None
    """Folder in which faults of pages are armed: see `kv_transfer.testing.armed`."""
