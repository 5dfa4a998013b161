"""Which format of decode's cache new requests go to: the wider one, until its pages are nearly used up. Pure.

Engines with a wider cache answer as precisely and at least as fast; engines with a denser one hold more. Two
marks keep requests from going to and fro: between them everything stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.routing.snapshot import Candidate
from kv_transfer.api import ELEMENT_BYTES, WireFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Shares of the wider pool's pages in use, in [0, 1]."""

    above: float = 0.8
    """From here on new requests go to the denser pool."""
    below: float = 0.6
    """They come back when no more than this is in use."""

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


def pressure(candidates: Sequence[Candidate], format: WireFormat) -> float:
    """Share of the pages in use in caches of this format; 1 where there are none."""
    mine = [candidate for candidate in candidates if candidate.format is format]
    total = sum(candidate.total_pages for candidate in mine)
    used = sum(candidate.total_pages - candidate.free_pages for candidate in mine)
    return used / total if total else 1.0


def leans_to_dense(was: bool, pressure: float, marks: Marks) -> bool:
    """Whether new requests go to the denser pool now, as they did before (`was`) or not."""
    return pressure >= marks.above or (was and pressure > marks.below)
