"""From wide elements to narrow ones: rounded to the nearest, ties to even; too large ones become the largest.

    narrow = (wide.float() / scale).clamp(-largest, largest).to(narrow type)

NaN and Inf are refused: vLLM's kernels would turn them into numbers, and nobody would know. On CUDA that is
known behind the host (`narrow_triton.py`): whoever sends asks before the first byte leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kv_transfer.api.page import CONVERTIBLE, Scales, WireFormat
from kv_transfer.codec.base import Conversion, Encoded

TYPES: Final[Mapping[WireFormat, torch.dtype]] = {
    WireFormat.BF16: torch.bfloat16,
    WireFormat.FP8_E4M3: torch.float8_e4m3fn,
    WireFormat.FP8_E5M2: torch.float8_e5m2,
}


def narrowed(floats: torch.Tensor, scale: torch.Tensor | float | None, target: WireFormat) -> torch.Tensor:
    """The rule itself.

    Args:
        floats: float32; used up.
        scale: None is 1.
    """
    largest = torch.finfo(TYPES[target]).max
    if scale is not None:
        floats /= scale
    return floats.clamp_(-largest, largest).to(TYPES[target])


def narrow_torch(
    caches: Sequence[torch.Tensor],
    page_ids: Sequence[int],
    target: WireFormat,
    scales: Scales,
    *,
    by_slot: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as `Conversion.encode` makes them; and [layers, pages], not 0 where a page holds no numbers.

    Args:
        scales: none, or of every layer.
        by_slot: as `Layout.by_slot`.
    """
    first = caches[0]
    index = torch.as_tensor(page_ids, dtype=torch.int64, device=first.device)
    out = torch.empty(
        (len(caches), len(page_ids), *first.shape[1:]), dtype=TYPES[target], device=first.device
    )
    flaws = torch.empty(out.shape[:2], dtype=torch.bool, device=first.device)
    for layer, cache in enumerate(caches):
        floats = torch.index_select(cache, 0, index).float()
        torch.logical_not(floats.isfinite().flatten(1).all(1), out=flaws[layer])
        scale = torch.tensor(scales[layer], device=first.device)[:, None] if scales else None
        narrow = narrowed(by_k_and_v(floats, by_slot=by_slot), scale, target)
        out[layer] = narrow.view(out.shape[1:])
    return out.view(torch.uint8).reshape(-1), flaws


def by_k_and_v(pages: torch.Tensor, *, by_slot: bool) -> torch.Tensor:
    """The same elements, with K and V as the last dimension but one."""
    count, heads, slots, content = pages.shape
    return (
        pages.view(count, heads, slots, 2, -1)
        if by_slot
        else pages.view(count, heads, 2, slots * content // 2)
    )


@dataclass(frozen=True, slots=True)
class Narrowing:
    target: WireFormat

    def encode(
        self,
        caches: Sequence[torch.Tensor],
        page_ids: Sequence[int],
        scales: Scales,
        *,
        by_slot: bool = False,
    ) -> Encoded:
        if caches[0].is_cuda:
            from kv_transfer.codec.narrow_triton import narrow_triton

            wire, flaws = narrow_triton(caches, page_ids, self.target, scales, by_slot=by_slot)
            return Encoded(wire, tuple(page_ids), flaws)
        wire, flaws = narrow_torch(caches, page_ids, self.target, scales, by_slot=by_slot)
        encoded = Encoded(wire, tuple(page_ids), flaws)
        if (bad := encoded.nonfinite()) is not None:
            raise bad
        return encoded


CONVERSIONS: Final[Mapping[tuple[WireFormat, WireFormat], Conversion]] = {
    (have, wanted): Narrowing(wanted) for have, targets in CONVERTIBLE.items() for wanted in targets
}
"""By format of the sender's cache, and of the receiver's."""
