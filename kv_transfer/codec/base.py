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


class Encoded:
    """Pages as bytes, and whether they may be used: on CUDA that is known behind the host."""

    def __init__(
        self, wire: torch.Tensor, page_ids: tuple[int, ...] = (), flaws: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            wire: uint8, as `Codec.encode` returns it.
            flaws: [layers, pages], not 0 where a page holds no numbers; copied to the host behind what is
                queued by now. None: nobody minds.
        """
        self.wire = wire
        self._page_ids = page_ids
        self._flaws = flaws if flaws is None or not flaws.is_cuda else _to_host(flaws)

    def nonfinite(self) -> NonfiniteSource | None:
        """What must not be used, if anything. On CUDA: once the stream has passed the encoding."""
        if self._flaws is None or not self._flaws.any():
            return None
        layer, page = self._flaws.nonzero()[0].tolist()
        return NonfiniteSource(layer, self._page_ids[page])


class Conversion(Protocol):
    """Gathers pages of one cache into bytes of another format."""

    def encode(
        self,
        caches: Sequence[torch.Tensor],
        page_ids: Sequence[int],
        scales: Scales,
        *,
        by_slot: bool = False,
    ) -> Encoded:
        """As `Codec.encode`, in the other format.

        Args:
            scales: of the cache that is to be filled, by layer.
            by_slot: as `Layout.by_slot`.

        Raises:
            NonfiniteSource: a page holds what the other format cannot, and that is known at once.
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


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
