"""The layout of a running engine's cache, read off its tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kv_transfer.api.page import BYTE_WIDE, Layout, WireFormat

FORMATS = {torch.bfloat16: WireFormat.BF16, torch.float16: WireFormat.FP16, torch.float32: WireFormat.FP32}

BYTE_FORMATS = {"fp8": WireFormat.FP8_E4M3, **{format.value: format for format in BYTE_WIDE}}
"""By vLLM's name of the cache's type."""


SPLIT_BY_SLOT = frozenset({"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"})
"""Attention backends of vLLM's on CUDA that split each slot into K and V; others may lay them elsewhere."""


class UnsupportedCache(ValueError):
    """This engine's cache cannot be shipped; the message names what is in the way."""


def isa_of(layers: Sequence[Any]) -> str:
    """How the kernels of these layers order elements inside a (page, head)."""
    isa = getattr(layers[0], "isa", None) if layers else None
    if isa is not None:
        return str(isa)
    return "by_slot" if layers and all(map(_splits_by_slot, layers)) else "native"


def _splits_by_slot(layer: Any) -> bool:
    backend = getattr(layer, "attn_backend", None)
    return (
        backend is not None and backend.get_name() in SPLIT_BY_SLOT and layer.head_size == layer.head_size_v
    )


def read_layout(caches: Mapping[str, torch.Tensor], *, isa: str, cache_dtype: str = "auto") -> Layout:
    """The common layout of all layers.

    Args:
        caches: by layer name, [num_pages, heads, block_size, content].
        isa: name of the attention kernel's element order on CPU; the device type elsewhere.
        cache_dtype: vLLM's name of it: where elements are bytes, it alone tells what they mean.

    Raises:
        UnsupportedCache: no layers, layers of different shape or type, an unknown element type, or a
            tensor that is not a 4-dimensional paged cache (Mamba state is not).
    """
    if not caches:
        raise UnsupportedCache("the engine registered no cache")
    shapes = {(t.dtype, tuple(t.shape)) if isinstance(t, torch.Tensor) else None for t in caches.values()}
    if len(shapes) != 1 or None in shapes:
        raise UnsupportedCache(f"layers differ in their caches, or hold state that is not pages: {shapes}")
    first = next(iter(caches.values()))
    if first.dim() != 4:
        raise UnsupportedCache(
            f"a cache page has {first.dim() - 1} dimensions, expected 3: {tuple(first.shape)}"
        )
    format = BYTE_FORMATS.get(cache_dtype) if first.dtype is torch.uint8 else FORMATS.get(first.dtype)
    if format is None:
        raise UnsupportedCache(f"cache element type {first.dtype} ({cache_dtype}) has no wire format")
    _, heads, block_size, content = first.shape
    return Layout(
        layers=len(caches),
        heads=heads,
        block_size=block_size,
        content=content,
        format=format,
        interior=f"{first.device.type}/{isa}",
    )
