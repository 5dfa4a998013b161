"""Same element type on both sides: pages travel as they lie in the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kv_transfer.api.page import BYTE_WIDE, WireFormat
from kv_transfer.codec.base import Codec


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Bit-exact copy of pages whose elements are `dtype`."""

    dtype: torch.dtype

    def encode(self, caches: Sequence[torch.Tensor], page_ids: Sequence[int]) -> torch.Tensor:
        first = caches[0]
        index = torch.as_tensor(page_ids, dtype=torch.int64, device=first.device)
        out = torch.empty(
            (len(caches), len(page_ids), *first.shape[1:]), dtype=self.dtype, device=first.device
        )
        for layer, cache in enumerate(caches):
            torch.index_select(cache, 0, index, out=out[layer])
        return out.view(torch.uint8).reshape(-1)

    def decode(self, wire: torch.Tensor, caches: Sequence[torch.Tensor], page_ids: Sequence[int]) -> None:
        first = caches[0]
        shape = (len(caches), len(page_ids), *first.shape[1:])
        expected = len(caches) * len(page_ids) * first[0].numel() * first.element_size()
        if wire.numel() != expected:
            raise ValueError(f"{len(page_ids)} pages need {expected} bytes, not {wire.numel()}")
        pages = wire.view(self.dtype).view(shape)
        index = torch.as_tensor(page_ids, dtype=torch.int64, device=first.device)
        for layer, cache in enumerate(caches):
            cache.index_copy_(0, index, pages[layer])


CODECS: dict[str, Codec] = {
    WireFormat.BF16: PlainCodec(torch.bfloat16),
    WireFormat.FP16: PlainCodec(torch.float16),
    WireFormat.FP32: PlainCodec(torch.float32),
    **dict.fromkeys(BYTE_WIDE, PlainCodec(torch.uint8)),
}
