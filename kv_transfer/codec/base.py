"""Between cache pages and wire bytes."""

from collections.abc import Sequence
from typing import Protocol

import torch


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
