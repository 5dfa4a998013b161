"""An engine on CPU rounds what it writes to an FP8 cache to the nearest; vLLM's kernel cuts off.

The kernel leaves alone what the format can hold. So numbers are divided by their scale and rounded before it
sees them, and it is told a scale of 1. Whether that is what lands in a page is tried at every start: that our
backend was not taken, or that the kernel has changed, must not go unseen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kv_transfer.api.page import WireFormat
from kv_transfer.codec.narrow import narrow_torch, narrowed
from kv_transfer.connector.layout import BYTE_FORMATS
from kv_transfer.connector.scaling import attention_layers

_MINUS_ZERO = 0x80
"""In both FP8 formats."""
_UNCACHED = (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)


class UnroundedWrites(RuntimeError):
    """Numbers would not land in the cache as promised: the engine must not start. The message says why."""


@dataclass(frozen=True, slots=True)
class _Unscaled:
    """As much of a layer as the kernel is told of."""

    isa: str
    _k_scale_float: float = 1.0
    _v_scale_float: float = 1.0


class RoundedImpl(CPUAttentionBackendImpl):
    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        target = BYTE_FORMATS.get(self.kv_cache_dtype)
        if target is None or self.attn_type in _UNCACHED:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        key = on_grid(key, layer._k_scale_float, target)
        value = on_grid(value, layer._v_scale_float, target)
        super().do_kv_cache_update(_Unscaled(layer.isa), key, value, kv_cache, slot_mapping)


class RoundedBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[RoundedImpl]:
        return RoundedImpl


def on_grid(numbers: torch.Tensor, scale: float, target: WireFormat) -> torch.Tensor:
    """Divided and rounded, in the type that they had: it holds all that the narrow one does."""
    floats = numbers.to(torch.float32, copy=True)
    return narrowed(floats, None if scale == 1.0 else scale, target).to(numbers.dtype)


def round_writes() -> None:
    """For models that this process loads from now on."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{RoundedBackend.__name__}")


def require_rounded(layers: Mapping[str, Any], block_size: int, dtype: torch.dtype) -> None:
    """Write every number there is through each layer, into pages of its own, and compare.

    Args:
        layers: all of vLLM's `static_forward_context`, when kernels have been chosen.
        dtype: what the model computes in.

    Raises:
        UnroundedWrites: a page holds something else than what a sender would have made of the numbers.
    """
    checked = attention_layers(layers)
    for name, layer in checked.items():
        target = BYTE_FORMATS.get(layer.impl.kv_cache_dtype)
        if target is None:
            raise UnroundedWrites(f"{name} has no FP8 cache: set `kv_writes: stock` for this model")
        wrong = _wrongly_written(layer, target, block_size, dtype)
        if wrong:
            raise UnroundedWrites(
                f"{name}: {wrong} numbers did not land in an FP8 page rounded to the nearest; "
                f"it is written by {type(layer.impl).__name__}. `kv_writes: stock` starts without rounding"
            )


def _wrongly_written(layer: Any, target: WireFormat, block_size: int, dtype: torch.dtype) -> int:
    impl = layer.impl
    key = every_number(impl.num_kv_heads, impl.head_size, block_size, dtype)
    value = key.flip(0).contiguous()
    slots = torch.arange(len(key))
    shape = (len(key) // block_size, impl.num_kv_heads, block_size, 2 * impl.head_size)
    found = torch.zeros(shape, dtype=torch.uint8)
    impl.do_kv_cache_update(layer, key, value, found, slots)
    wide = torch.zeros(shape, dtype=dtype)
    k_half, v_half = wide.view(*shape[:2], 2 * block_size, -1).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, k_half, v_half, slots, layer.isa)
    scales = ((layer._k_scale_float, layer._v_scale_float),)
    expected, _ = narrow_torch([wide], range(shape[0]), target, scales, by_slot=False)
    return int((_unsigned_zeros(found.view(-1)) != _unsigned_zeros(expected)).sum())


def _unsigned_zeros(codes: torch.Tensor) -> torch.Tensor:
    """Some of the kernels drop the sign of a zero, which changes no product and no sum."""
    return torch.where(codes == _MINUS_ZERO, 0, codes)


def every_number(heads: int, head_size: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, head_size], whole pages: all finite BF16, as far as `dtype` has them, and zeros."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    numbers = torch.where(numbers.isfinite(), numbers, 0)
    per_page = heads * head_size * block_size
    whole = -(-len(numbers) // per_page) * per_page
    return torch.nn.functional.pad(numbers, (0, whole - len(numbers))).view(-1, heads, head_size)
