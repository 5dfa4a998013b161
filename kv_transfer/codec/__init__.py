"""Wire formats: one file per family, one registry."""

from kv_transfer.api.page import BYTE_WIDE, Layout, Scales
from kv_transfer.codec.base import Codec, Conversion, Encoded, NonfiniteSource
from kv_transfer.codec.narrow import CONVERSIONS
from kv_transfer.codec.plain import CODECS as PLAIN

__all__ = ["CODECS", "CONVERSIONS", "Codec", "Conversion", "Encoded", "NonfiniteSource", "misfit"]

CODECS: dict[str, Codec] = {**PLAIN}
"""By wire format. A format missing here is refused at start-up, by name."""


def misfit(have: Layout, wanted: Layout, scales: Scales, own: Scales = ()) -> str:
    """Why pages of one cache cannot be made into pages of another, with both layouts; empty when they can.

    Args:
        scales: of the cache that is to be filled.
        own: of the cache that has the pages.
    """
    reason = _misfit(have, wanted, scales, own)
    return reason and f"{reason} (prefill: {have}; decode: {wanted})"


def _misfit(have: Layout, wanted: Layout, scales: Scales, own: Scales) -> str:
    if (have.format, wanted.format) not in CONVERSIONS:
        return have.difference(wanted) or _scales_apart(have, scales, own)
    if difference := have.in_format(wanted.format).difference(wanted):
        return difference
    if scales and len(scales) != have.layers:
        return f"scales of {len(scales)} layers for {have.layers}"
    if not all(0 < scale < float("inf") for pair in scales for scale in pair):
        return "a scale is no positive number"
    if any(k != v for k, v in scales) and not (have.by_head or have.by_slot):
        return f"scales that differ for K and V: where they lie in {have.interior} is not known"
    return ""


def _scales_apart(layout: Layout, scales: Scales, own: Scales) -> str:
    """Bytes are shipped as they are: both kernels must read the same numbers in them."""
    if layout.format not in BYTE_WIDE:
        return ""  # its kernels read no scales
    ones = ((1.0, 1.0),) * layout.layers
    ours, theirs = own or ones, scales or ones
    if len(ours) != len(theirs):
        return f"scales of {len(ours)} layers for {len(theirs)}"
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((f"scales of K and V in layer {n}: {a} != {b}" for n, (a, b) in pairs if a != b), "")
