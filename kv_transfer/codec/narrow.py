"""From wide elements to narrow ones: rounded to the nearest, ties to even; too large ones become the largest.

    narrow = (wide.float() / scale).clamp(-largest, largest).to(narrow type)

NaN and Inf are refused: vLLM's kernels would turn them into numbers, and nobody would know. In a page of
vLLM's CPU cache each head has the K of all slots before their V; inside both halves the order is the same in
all formats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kv_transfer.api.page import CONVERTIBLE, Scales, WireFormat
from kv_transfer.codec.base import Conversion, NonfiniteSource

_TYPES: Final[Mapping[WireFormat, torch.dtype]] = {
    WireFormat.BF16: torch.bfloat16,
    WireFormat.FP8_E4M3: torch.float8_e4m3fn,
    WireFormat.FP8_E5M2: torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Narrowing:
    dtype: torch.dtype

    def encode(self, caches: Sequence[torch.Tensor], page_ids: Sequence[int], scales: Scales) -> torch.Tensor:
        first = caches[0]
        index = torch.as_tensor(page_ids, dtype=torch.int64, device=first.device)
        out = torch.empty(
            (len(caches), len(page_ids), *first.shape[1:]), dtype=self.dtype, device=first.device
        )
        largest = torch.finfo(self.dtype).max
        for layer, cache in enumerate(caches):
            wide = torch.index_select(cache, 0, index).float()
            finite = wide.isfinite().flatten(1).all(1)
            if not finite.all():
                raise NonfiniteSource(layer, page_ids[int(finite.int().argmin())])
            halves = wide.view(len(page_ids), first.shape[1], 2, -1)
            if scales:
                halves /= torch.tensor(scales[layer], device=first.device)[:, None]
            out[layer] = halves.clamp_(-largest, largest).to(self.dtype).view(out.shape[1:])
        return out.view(torch.uint8).reshape(-1)


CONVERSIONS: Final[Mapping[tuple[WireFormat, WireFormat], Conversion]] = {
    (have, wanted): Narrowing(_TYPES[wanted]) for have, targets in CONVERTIBLE.items() for wanted in targets
}
"""By format of the sender's cache, and of the receiver's."""
