"""Which format of decode's cache new requests go to: the wider one, while it could hold all that there is.
Pure.

Engines with a wider cache answer more precisely and at least as fast; engines with a denser one hold more.
What counts is what all decode engines hold, wherever it is: measured by the wider pool alone, requests would
come back as soon as it had emptied, and go to and fro for as long as the load lasts. Between two marks
everything stays as it is. A page holds as many tokens in either format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.routing.snapshot import Candidate
from kv_transfer.api import ELEMENT_BYTES, WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Pages that decode's requests hold, as shares of the wider pool's pages."""

    above: float = 0.8
    """From here on new requests go to the denser pool."""
    below: float = 0.6
    """They come back when they hold no more than this."""

    def __post_init__(self) -> None:
        if not 0 < self.below < self.above <= 1:
            raise ValueError(f"marks must be 0 < below < above <= 1, not {self.below} and {self.above}")


class Formats(NamedTuple):
    wide: WireFormat
    dense: WireFormat


def formats(candidates: Sequence[Candidate]) -> Formats | None:
    """The widest and the densest cache; None where there is no choice."""
    by_width = sorted({candidate.format for candidate in candidates}, key=lambda f: (ELEMENT_BYTES[f], f))
    return Formats(wide=by_width[-1], dense=by_width[0]) if len(by_width) > 1 else None


def pressure(candidates: Sequence[Candidate], wide: WireFormat) -> float:
    """Pages in use in all of them, over the pages of caches in this format; it may exceed 1."""
    used = sum(candidate.total_pages - candidate.free_pages for candidate in candidates)
    room = sum(candidate.total_pages for candidate in candidates if candidate.format is wide)
    return used / room if room else 1.0


def leans_to_dense(was: bool, pressure: float, marks: Marks) -> bool:
    """Whether new requests go to the denser pool now, as they did before (`was`) or not."""
    return pressure >= marks.above or (was and pressure > marks.below)
