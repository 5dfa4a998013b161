"""What a cache page looks like, in words both sides of a transfer can compare."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class WireFormat(StrEnum):
    """Encoding of page bytes on the wire."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


ELEMENT_BYTES: Final = {WireFormat.BF16: 2, WireFormat.FP16: 2, WireFormat.FP32: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Geometry of one engine's cache. Two layouts that differ in any field never exchange bytes."""

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

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        per_layer = self.heads * self.block_size * self.content * ELEMENT_BYTES[self.format]
        return self.layers * per_layer

    def difference(self, other: "Layout") -> str:
        """Fields that differ, as `name: ours != theirs`; empty when equal."""
        pairs = ((n, getattr(self, n), getattr(other, n)) for n in self.__dataclass_fields__)
        return ", ".join(f"{n}: {ours} != {theirs}" for n, ours, theirs in pairs if ours != theirs)
