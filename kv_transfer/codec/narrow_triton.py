"""The conversion on CUDA: pages are gathered and made narrower in one pass, and nothing waits for it.

As `narrow.narrow_torch`, bit for bit. Rounding is done with integers: whether a device has instructions for
FP8, and how they round, does not matter. Under `TRITON_INTERPRET=1` it runs on CPU, for tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from kv_transfer.api.page import Scales, WireFormat

_BLOCK: Final = 2048
_NONE: Final = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class _Target:
    """A float type by its parts."""

    bias: int
    """Of the exponent."""
    mantissa: int
    """Its bits."""
    largest: int
    """The largest finite number, as the bits of a float32."""
    sign: int
    nan: int
    bits: torch.dtype
    """Integers of the same width."""


_TARGETS: Final[Mapping[WireFormat, _Target]] = {
    WireFormat.FP8_E4M3: _Target(7, 3, 0x43E00000, 0x80, 0x7F, torch.uint8),  # 448
    WireFormat.FP8_E5M2: _Target(15, 2, 0x47600000, 0x80, 0x7F, torch.uint8),  # 57344
    WireFormat.BF16: _Target(127, 7, 0x7F7F0000, 0x8000, 0x7FC0, torch.int16),
}


def narrow_triton(
    caches: Sequence[torch.Tensor],
    page_ids: Sequence[int],
    target: WireFormat,
    scales: Scales,
    *,
    by_slot: bool,
    block: int = _BLOCK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `narrow.narrow_torch`; everything is queued on the current stream.

    Args:
        block: elements converted at once; a power of two.
    """
    first = caches[0]
    _, heads, slots, content = first.shape
    size = heads * slots * content
    chunks = triton.cdiv(size, block)
    index = _queued(torch.tensor(page_ids, dtype=torch.int64), first.device)
    made = _TARGETS[target]
    wire = torch.empty((len(caches), len(page_ids), size), dtype=made.bits, device=first.device)
    flaws = torch.empty((len(caches), len(page_ids), chunks), dtype=torch.int32, device=first.device)
    bits = torch.int32 if first.dtype is torch.float32 else torch.int16
    for layer, cache in enumerate(caches):
        k, v = scales[layer] if scales else _NONE
        _narrow_page[(len(page_ids), chunks)](
            cache.view(bits),
            *cache.stride(),
            index,
            wire[layer],
            flaws[layer],
            slots,
            content,
            size,
            k,
            v,
            WIDE=bits.itemsize * 8,
            SCALED=bool(scales),
            BY_SLOT=by_slot,
            BIAS=made.bias,
            MANTISSA=made.mantissa,
            LARGEST=made.largest,
            SIGN=made.sign,
            NAN=made.nan,
            BLOCK=block,
        )
    return wire.view(torch.uint8).reshape(-1), flaws.sum(2)


def _queued(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


@triton.jit
def _narrow_page(  # noqa: PLR0917
    cache,
    page_stride,
    head_stride,
    slot_stride,
    element_stride,
    page_ids,
    wire,
    flaws,
    slots,
    content,
    size,
    k_scale,
    v_scale,
    WIDE: tl.constexpr,  # noqa: N803
    SCALED: tl.constexpr,  # noqa: N803
    BY_SLOT: tl.constexpr,  # noqa: N803
    BIAS: tl.constexpr,  # noqa: N803
    MANTISSA: tl.constexpr,  # noqa: N803
    LARGEST: tl.constexpr,  # noqa: N803
    SIGN: tl.constexpr,  # noqa: N803
    NAN: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    page = tl.program_id(0)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    element = at % content
    slot = (at // content) % slots
    head = at // (content * slots)
    origin = tl.load(page_ids + page) * page_stride
    where = origin + head * head_stride + slot * slot_stride + element * element_stride
    bits = tl.load(cache + where, mask=inside, other=0).to(tl.int32)
    if WIDE == 16:
        bits = bits << 16
    sign = tl.where(bits < 0, SIGN, 0)
    wrong = inside & ((bits & 0x7FFFFFFF) >= 0x7F800000)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    tl.store(flaws + page * tl.num_programs(1) + chunk, tl.sum(wrong.to(tl.int32), 0))

    if SCALED:
        of_head = slot * content + element
        is_v = element * 2 >= content if BY_SLOT else of_head * 2 >= slots * content
        scale = tl.where(is_v, v_scale, k_scale).to(tl.float32)
        # Not `/`, which is approximate on a device.
        scaled = tl.div_rn(bits.to(tl.float32, bitcast=True), scale)
        bits = scaled.to(tl.int32, bitcast=True)

    # The bits of positive floats are ordered as the floats are.
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    shift: tl.constexpr = 23 - MANTISSA
    even = (magnitude >> shift) & 1
    narrow = (magnitude + ((BIAS - 127) * 8388608) + ((1 << (shift - 1)) - 1) + even) >> shift
    if BIAS < 127:
        # What is too small for a full mantissa is rounded by an addition that leaves it so many bits.
        beside: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
        beside_bits: tl.constexpr = (151 - BIAS - MANTISSA) * 8388608
        small = (magnitude.to(tl.float32, bitcast=True) + beside).to(tl.int32, bitcast=True) - beside_bits
        narrow = tl.where(magnitude < (128 - BIAS) * 8388608, small, narrow)
    narrow = tl.where(is_nan, NAN, narrow) | sign
    tl.store(wire + page * size + at, narrow.to(wire.dtype.element_ty), mask=inside)
