"""What a test and an engine of `cell_engine` tell each other, a line of JSON each."""

from typing import Final

import msgspec

from kv_transfer.api.faults import PageFaultOrder
from kv_transfer.testing.armed import Landed

PAGE: Final = 32
"""Tokens of a page."""
PAGES: Final = 24
"""Of the cache, the null page among them."""
BATCHED: Final = 256
"""Tokens of one step: longer prompts are computed in pieces."""
CONTEXT: Final = 512


class Given(msgspec.Struct, frozen=True):
    """To one request in one step."""

    pages: tuple[int, ...]
    """Of its row, as far as attention reads."""
    slots: tuple[int, ...]
    content: tuple[int, ...]
    """Digests of those of the pages that were full before the step."""


Step = dict[str, Given]
"""By request."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    prompt: tuple[int, ...]
    tokens: int = 12
    salt: str = ""
    at: int = 0
    """Steps before it is asked."""
    after: str = ""
    """It is asked when this request has ended."""
    sends: str = ""
    """Transfer id under which its pages are shipped."""
    fetches: str = ""
    """Likewise, under which its pages come."""
    deadline_s: float = 20.0
    """Of the transfer."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    asks: tuple[Ask, ...]
    faults: tuple[PageFaultOrder, ...] = ()


class Answer(msgspec.Struct, kw_only=True):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: str
    cause: str = ""
    """Of the page fault that it ended with."""
    handoff: str = ""
    """How its pages came."""


class Played(msgspec.Struct, kw_only=True):
    answers: dict[str, Answer]
    steps: list[Step]
    landed: dict[str, Landed]
    mismatches: dict[str, int]
    died: str = ""
    """What ended the engine, if anything did."""
    missing: int = 0
    """Pages that did not come back."""
    referenced: int = 0
    """Pages that nobody uses and that have references all the same."""
    remembered: int = 0
    """Requests that the ledger still knows."""
