"""Between cache pages and wire bytes."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kv_transfer.api.page import Scales


class NonfiniteSource(ValueError):
    """NaN or Inf in a page that was to be converted: narrow formats would turn it into a number."""

    def __init__(self, layer: int, page: int) -> None:
        super().__init__(f"NaN or Inf in layer {layer}, page {page}")
        self.layer, self.page = layer, page


class Conversion(Protocol):
    """Gathers pages of one cache into bytes of another format."""

    def encode(self, caches: Sequence[torch.Tensor], page_ids: Sequence[int], scales: Scales) -> torch.Tensor:
        """As `Codec.encode`, in the other format.

        Args:
            scales: of the cache that is to be filled, by layer.

        Raises:
            NonfiniteSource: a page holds what the other format cannot.
        """


class Codec(Protocol):
    """Gathers pages of one cache into bytes, and puts such bytes into pages of another."""

    def encode(self, caches: Sequence[torch.Tensor], page_ids: Sequence[int]) -> torch.Tensor:
        """Copy whole pages of every layer into one new buffer.

        Args:
            caches: per layer, [num_pages, heads, block_size, content], in layer order.
            page_ids: pages to copy, in prompt order, each in [0, num_pages).

        Returns:
            uint8, [pages * page_bytes], on the caches' device: for each layer all pages in the given
            order. The pages may be reused as soon as this has returned (on CUDA: as soon as the
            current stream has passed this point).
        """

    def decode(self, wire: torch.Tensor, caches: Sequence[torch.Tensor], page_ids: Sequence[int]) -> None:
        """Write `wire`, as made by `encode` for as many pages, into the given pages of every layer.

        Raises:
            ValueError: `wire` has another size than these pages; nothing was written.
        """
