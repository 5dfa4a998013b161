"""The layout of a running engine's cache, read off its tensors."""

from collections.abc import Mapping

import torch

from kv_transfer.api.page import BYTE_WIDE, Layout, WireFormat

FORMATS = {torch.bfloat16: WireFormat.BF16, torch.float16: WireFormat.FP16, torch.float32: WireFormat.FP32}

BYTE_FORMATS = {"fp8": WireFormat.FP8_E4M3, **{format.value: format for format in BYTE_WIDE}}
"""By vLLM's name of the cache's type."""


class UnsupportedCache(ValueError):
    """This engine's cache cannot be shipped; the message names what is in the way."""


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
