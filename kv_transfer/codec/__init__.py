"""Wire formats: one file per family, one registry."""

from kv_transfer.api.page import Layout, Scales
from kv_transfer.codec.base import Codec, NonfiniteSource
from kv_transfer.codec.narrow import CONVERSIONS
from kv_transfer.codec.plain import CODECS as PLAIN

__all__ = ["CODECS", "CONVERSIONS", "Codec", "NonfiniteSource", "misfit"]

CODECS: dict[str, Codec] = {**PLAIN}
"""By wire format. A format missing here is refused at start-up, by name."""


def misfit(have: Layout, wanted: Layout, scales: Scales) -> str:
    """Why pages of one cache cannot be made into pages of another; empty when they can.

    Args:
        scales: of the cache that is to be filled.
    """
    if (have.format, wanted.format) not in CONVERSIONS:
        return have.difference(wanted)
    if difference := have.in_format(wanted.format).difference(wanted):
        return difference
    if scales and len(scales) != have.layers:
        return f"scales of {len(scales)} layers for {have.layers}"
    if not all(0 < scale < float("inf") for pair in scales for scale in pair):
        return "a scale is no positive number"
    if any(k != v for k, v in scales) and not have.interior.startswith("cpu/"):
        return f"scales that differ for K and V: where they lie in {have.interior} is not known"
    return ""
