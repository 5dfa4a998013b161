"""The Triton conversion against torch, bit for bit. Run by `test_kernels.py`, in a process that imports
Triton with `TRITON_INTERPRET=1`, or on a GPU."""

import os
from collections.abc import Callable

import pytest
import torch

from kv_transfer.api.page import CONVERTIBLE, WireFormat
from kv_transfer.codec import CONVERSIONS
from kv_transfer.codec.narrow import narrow_torch
from kv_transfer.codec.narrow_triton import narrow_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 is not set")
SCALES = (1.0, 0.5, 2.0, 0.25, 3.0, 0.1, 7.7, 0.013)
REFERENCE: dict[WireFormat, Callable[[torch.Tensor, float], torch.Tensor]] = {
    WireFormat.FP8_E4M3: lambda x, scale: (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
    WireFormat.FP8_E5M2: lambda x, scale: (x.float() / scale).clamp(-57344, 57344).to(torch.float8_e5m2),
}
PAIRS = [(have, wanted) for have, targets in CONVERTIBLE.items() for wanted in sorted(targets)]
DTYPES = {WireFormat.FP32: torch.float32, WireFormat.BF16: torch.bfloat16}
WHOLE = 1 << 16


def every_bf16() -> torch.Tensor:
    """One page of one head, NaN and Inf included."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(1, 1, 256, 256)


def some_cache(dtype: torch.dtype, seed: int, *, permuted: bool = False) -> torch.Tensor:
    """[5 pages, 2 heads, 4 slots, 8 elements], of all sizes; in memory heads may lie inside slots."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 4, 2, 8) if permuted else (5, 2, 4, 8)
    numbers = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(6).exp2()
    cache = numbers.to(dtype)
    return cache.transpose(1, 2) if permuted else cache


@interpreted
@pytest.mark.filterwarnings("ignore:.* encountered in divide:RuntimeWarning")  # NaN are among them
@pytest.mark.parametrize("target", list(REFERENCE))
def test_each_bf16_value_with_each_scale_is_what_the_reference_says(target: WireFormat) -> None:
    cache = every_bf16()
    pairs = tuple((scale, scale) for scale in SCALES)

    wire, flaws = narrow_triton([cache] * len(SCALES), [0], target, pairs, by_slot=False, block=WHOLE)

    for scale, found in zip(SCALES, wire.view(len(SCALES), -1), strict=True):
        expected = REFERENCE[target](cache, scale).view(torch.uint8).view(-1)
        assert torch.equal(found, expected), f"scale {scale}"
    assert flaws.tolist() == [[int((~cache.isfinite()).sum())]] * len(SCALES)


@interpreted
@pytest.mark.parametrize(("permuted", "by_slot"), [(False, True), (True, False)])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pages_are_gathered_and_scaled_as_by_torch(
    pair: tuple[WireFormat, WireFormat], permuted: bool, by_slot: bool
) -> None:
    have, wanted = pair
    caches = [some_cache(DTYPES[have], seed, permuted=permuted) for seed in range(2)]
    scales = ((0.3, 2.0), (1.0, 0.013))

    wire, flaws = narrow_triton(caches, [3, 0], wanted, scales, by_slot=by_slot, block=64)

    assert torch.equal(wire, narrow_torch(caches, [3, 0], wanted, scales, by_slot=by_slot)[0])
    assert not flaws.any()


@interpreted
def test_the_smallest_and_the_largest_float32_are_rounded_as_by_torch() -> None:
    edges = torch.tensor([1e-45, 1.2e-38, 9e-41, 3.4028235e38, -3.39e38, -0.0, 2.0**-10, 2.0**-17])
    small = torch.linspace(-0.02, 0.02, 120)
    cache = torch.cat([edges, small]).view(1, 1, 8, 16)

    for wanted in CONVERTIBLE[WireFormat.FP32]:
        wire, _ = narrow_triton([cache], [0], wanted, (), by_slot=False, block=128)
        assert torch.equal(wire, narrow_torch([cache], [0], wanted, (), by_slot=False)[0]), wanted


@interpreted
def test_what_is_no_number_is_counted_by_layer_and_page_and_refuses_nothing_yet() -> None:
    caches = [some_cache(torch.bfloat16, seed) for seed in range(3)]
    caches[1][4, 1, 2, 3] = float("nan")
    caches[1][4, 0, 0, 0] = float("-inf")
    caches[2][2, 1, 3, 7] = float("inf")  # not wanted

    _, flaws = narrow_triton(caches, [0, 4], WireFormat.FP8_E4M3, (), by_slot=False, block=32)

    assert flaws.tolist() == [[0, 0], [0, 2], [0, 0]]


@pytest.mark.gpu
def test_the_conversion_on_a_gpu_is_bit_for_bit_that_of_torch_on_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU on this machine")
    if INTERPRETED:
        pytest.skip("TRITON_INTERPRET=1 is set: the kernel would not run on the GPU")
    pairs = tuple((scale, scale) for scale in SCALES)
    for target, reference in REFERENCE.items():
        cache = every_bf16()
        encoded = CONVERSIONS[WireFormat.BF16, target].encode([cache.cuda()] * len(SCALES), [0], pairs)
        torch.cuda.synchronize()
        for scale, found in zip(SCALES, encoded.wire.cpu().view(len(SCALES), -1), strict=True):
            assert torch.equal(found, reference(cache, scale).view(torch.uint8).view(-1)), scale
        refused = encoded.nonfinite()
        assert refused is not None
        assert (refused.layer, refused.page) == (0, 0)
    for have, wanted in PAIRS:
        for by_slot in (False, True):
            caches = [some_cache(DTYPES[have], seed, permuted=by_slot) for seed in range(2)]
            scales = ((0.3, 2.0), (1.0, 0.013))
            encoded = CONVERSIONS[have, wanted].encode(
                [cache.cuda() for cache in caches], [3, 0, 4], scales, by_slot=by_slot
            )
            torch.cuda.synchronize()
            expected, _ = narrow_torch(caches, [3, 0, 4], wanted, scales, by_slot=by_slot)
            assert torch.equal(encoded.wire.cpu(), expected), (have, wanted)
            assert encoded.nonfinite() is None
