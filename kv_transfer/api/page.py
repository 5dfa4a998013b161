"""What a cache page looks like, in words both sides of a transfer can compare."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final


class WireFormat(StrEnum):
    """Encoding of page bytes on the wire."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


ELEMENT_BYTES: Final = {
    WireFormat.BF16: 2,
    WireFormat.FP16: 2,
    WireFormat.FP32: 4,
    WireFormat.FP8_E4M3: 1,
    WireFormat.FP8_E5M2: 1,
}
BYTE_WIDE: Final = frozenset({WireFormat.FP8_E4M3, WireFormat.FP8_E5M2})
"""An engine can keep its cache in these whatever it computes in; vLLM holds such a cache as bytes."""
LARGEST: Final = {WireFormat.FP8_E4M3: 448.0, WireFormat.FP8_E5M2: 57344.0}
"""Finite number of each narrow format."""
CONVERTIBLE: Final[Mapping[WireFormat, frozenset[WireFormat]]] = {
    WireFormat.FP32: BYTE_WIDE | {WireFormat.BF16},
    WireFormat.BF16: BYTE_WIDE,
}
"""By format of the sender's cache: formats of a receiver's cache that it can make of it. Always narrower."""

BY_SLOT: Final = "/by_slot"
"""How the interior of a cache is called whose kernels split each slot into K and V."""

Scales = tuple[tuple[float, float], ...]
"""By layer, for K and for V: what numbers of a cache are multiplied with when they are read. Empty: 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Geometry of one engine's cache. Two that differ exchange no bytes, unless it is their format alone and
    the sender can convert (`CONVERTIBLE`)."""

    layers: int
    heads: int
    """KV heads held by this worker."""
    block_size: int
    """Token slots in a page."""
    content: int
    """Elements per head and slot, K and V together."""
    format: WireFormat
    interior: str
    """Order of elements inside one (page, head), e.g. `cpu/vec`: it differs between kernels."""

    def __str__(self) -> str:
        """For messages that say what is on each side."""
        return (
            f"{self.format}, {self.layers} layers, {self.heads} heads, {self.block_size} slots, "
            f"{self.content} elements, {self.interior}"
        )

    @property
    def by_head(self) -> bool:
        """Whether in each page each head has the K of all slots before their V."""
        return self.interior.startswith("cpu/")

    @property
    def by_slot(self) -> bool:
        """Whether each slot has its K before its V."""
        return self.interior.endswith(BY_SLOT)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        per_layer = self.heads * self.block_size * self.content * ELEMENT_BYTES[self.format]
        return self.layers * per_layer

    def in_format(self, format: WireFormat) -> "Layout":
        """The same pages with other elements."""
        return replace(self, format=format)

    def difference(self, other: "Layout") -> str:
        """Fields that differ, as `name: ours != theirs`; empty when equal."""
        pairs = ((n, getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__)
        return ", ".join(f"{n}: {ours} != {theirs}" for n, ours, theirs in pairs if ours != theirs)
