"""Scale files: by what an engine divides the numbers that it keeps in an FP8 cache, layer by layer.

JSON, so that people can read and compare them. `phasegate calibrate` writes them, an engine sets its layers'
scales from one when it starts, and its peers are told those scales with every offer.
"""

import hashlib
import math
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from kv_transfer.api.page import BYTE_WIDE, LARGEST, WireFormat

MARGIN: Final = 2.0
"""Numbers up to so many times the largest that was measured do not saturate."""
FLOOR: Final = 1 / 64
"""Least scale. However small what was measured is, e4m3 keeps all up to 7 then, and steps of 2**-15."""

Scale = Annotated[float, msgspec.Meta(ge=2.0**-126, le=2.0**127)]
"""A float32 that one can divide by."""
Seen = Annotated[float, msgspec.Meta(ge=0)]


class ScaleFileError(ValueError):
    """The file cannot be used. The message names it, and the field."""


class LayerScales(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """As the engine calls the layer."""
    k: Scale
    v: Scale
    k_max: Seen | None = None
    """Largest absolute value that was measured."""
    v_max: Seen | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How, for the record."""

    model: str
    dtype: str
    tokens: int
    text_sha256: str
    margin: float
    floor: float


class ScaleFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    format: WireFormat
    """Of the cache. Scales of one format are wrong for another."""
    source_revision: str | None
    """Of the model, as its profile names it."""
    layers: tuple[LayerScales, ...]
    measured: Measured | None = None

    def __post_init__(self) -> None:
        if self.format not in BYTE_WIDE:
            raise ValueError(f"format: a cache in {self.format} has no scales")
        if not self.layers:
            raise ValueError("layers: there are none")
        names = [layer.name for layer in self.layers]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"layers: {twice} is there twice")


def read_scale_file(path: Path, *, sha256: str = "") -> ScaleFile:
    """
    Args:
        sha256: of the file's bytes, when they must be those that were seen before.

    Raises:
        ScaleFileError: there is no such file, it has changed, or it holds no scales.
    """
    raw = _bytes_of(path)
    if sha256 and hashlib.sha256(raw).hexdigest() != sha256:
        raise ScaleFileError(f"{path}: it has changed since the engine was told of it")
    try:
        return msgspec.json.decode(raw, type=ScaleFile)
    except msgspec.DecodeError as bad:
        raise ScaleFileError(f"{path}: {bad}") from None


def scale_file_sha256(path: Path) -> str:
    """What two engines compare to know that they use the same scales.

    Raises:
        ScaleFileError: it cannot be read.
    """
    return hashlib.sha256(_bytes_of(path)).hexdigest()


def encode_scale_file(file: ScaleFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"


def scale_for(largest: float, format: WireFormat) -> float:
    """For numbers up to `largest`: a power of two, so that dividing by it changes no mantissa.

    Raises:
        ValueError: `largest` is no number.
    """
    if not (math.isfinite(largest) and largest >= 0):
        raise ValueError(f"{largest} is no largest absolute value")
    needed = max(largest * MARGIN / LARGEST[format], FLOOR)
    return 2.0 ** math.ceil(math.log2(needed))


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as bad:
        raise ScaleFileError(f"{path}: {bad.strerror}") from None
