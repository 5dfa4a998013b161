"""What two engines must have in common so that pages of the one mean the same to the other.

The formats of weights and caches are not part of it: those may differ, as the profile says. What the engines
compute, how a page is made and what a token id stands for may not.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final

import msgspec

Facts = dict[str, str]
"""By name, in few words; long contents as their SHA-256."""

_SHOWN: Final = 48
"""Characters of a fact that a message shows whole."""
_PART: Final = 16
"""Characters shown of a longer one, from where it parts from the other."""
_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """Read off the folder that an engine loads; never changes while the engine lives.

    One without any facts equals only its like.
    """

    architecture: Facts = field(default_factory=dict)
    kv_geometry: Facts = field(default_factory=dict)
    rope: Facts = field(default_factory=dict)
    tokenizer: Facts = field(default_factory=dict)
    chat_template: Facts = field(default_factory=dict)
    source: Facts = field(default_factory=dict)
    """Of the weights: the common parent of all their formats."""
    scale_file: Facts = field(default_factory=dict)
    """Of the caches' scales, where a file gives them."""

    @property
    def digest(self) -> str:
        """SHA-256 over everything, in hex."""
        return hashlib.sha256(_encode(self)).hexdigest()

    @property
    def short(self) -> str:
        """For people and clients: `fp_` and ten digits."""
        return f"fp_{self.digest[:10]}"

    def difference(self, other: "Contract") -> str:
        """What differs, as `rope: theta 10000 against 100000`, our own first; empty when nothing does."""
        parts = (
            (part.name, _apart(getattr(self, part.name), getattr(other, part.name))) for part in fields(self)
        )
        return "; ".join(f"{_words(name)}: {apart}" for name, apart in parts if apart)

    def disagreement(self, other: "Contract", *, ours: str, theirs: str) -> str:
        """The same as a sentence that says whose contracts they are; empty when they are equal."""
        difference = self.difference(other)
        return difference and f"{ours} and {theirs} differ in {difference}"

    def change(self, now: "Contract", *, meanwhile: str) -> str:
        """What has changed in the model folder since this one was read off it; empty when nothing has.

        Args:
            meanwhile: what was done between the two, as `loading it`.
        """
        return self.disagreement(now, ours="the model folder before", theirs=f"after {meanwhile}")


def _apart(ours: Facts, theirs: Facts) -> str:
    return "" if ours == theirs else ", ".join(_pairs(ours, theirs))


def _pairs(ours: Facts, theirs: Facts) -> Iterator[str]:
    for name in {**ours, **theirs}:
        one, other = ours.get(name, "none"), theirs.get(name, "none")
        if one != other:
            parting = _parting(one, other)
            yield f"{_words(name)} {_shown(one, parting)} against {_shown(other, parting)}"


def _parting(one: str, other: str) -> int:
    """The first place where they differ."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: str, parting: int) -> str:
    """Whole, or the piece of it in which the two part."""
    if len(value) <= _SHOWN:
        return value
    start = max(0, parting - _PART // 2)
    piece = value[start : start + _PART]
    return f"{'...' if start else ''}{piece}{'...' if start + _PART < len(value) else ''}"
