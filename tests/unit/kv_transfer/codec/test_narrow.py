"""Pages become narrower on their way, as the reference says, bit for bit."""

import pytest
import torch

from kv_transfer.api.page import CONVERTIBLE, Layout, Scales, WireFormat
from kv_transfer.codec import CODECS, CONVERSIONS, NonfiniteSource, misfit

SCALES = (1.0, 0.5, 2.0, 0.25, 3.0, 0.1, 7.7, 0.013)
FP8 = {WireFormat.FP8_E4M3: torch.float8_e4m3fn, WireFormat.FP8_E5M2: torch.float8_e5m2}
LARGEST = {WireFormat.FP8_E4M3: 448.0, WireFormat.FP8_E5M2: 57344.0}
CPU = Layout(layers=2, heads=2, block_size=4, content=8, format=WireFormat.BF16, interior="cpu/vec")
NARROW = CPU.in_format(WireFormat.FP8_E4M3)


def every_finite_bf16() -> torch.Tensor:
    """One cache of one layer: [pages, 1, 16, 16]."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values[~values.isfinite()] = 0
    return values.view(-1, 1, 16, 16)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("target", list(FP8))
def test_every_bf16_value_becomes_what_the_reference_says(target: WireFormat, scale: float) -> None:
    cache = every_finite_bf16()
    pages = list(range(len(cache)))

    wire = CONVERSIONS[WireFormat.BF16, target].encode([cache], pages, ((scale, scale),)).wire

    largest = LARGEST[target]
    reference = (cache.float() / scale).clamp(-largest, largest).to(FP8[target])
    assert torch.equal(wire, reference.view(torch.uint8).reshape(-1))
    assert wire.view(FP8[target]).float().isfinite().all()


def test_ties_go_to_the_even_neighbour_and_nothing_is_cut_off() -> None:
    """1.0625 lies half way between 1.0 and 1.125, 1.1875 between 1.125 and 1.25."""
    cache = torch.tensor([1.0625, 1.1875, 1.07, -1.0625] * 8, dtype=torch.bfloat16).view(1, 1, 4, 8)

    wire = CONVERSIONS[WireFormat.BF16, WireFormat.FP8_E4M3].encode([cache], [0], ()).wire

    assert wire.view(torch.float8_e4m3fn).float()[:4].tolist() == [1.0, 1.25, 1.125, -1.0]


def test_where_each_slot_has_its_k_before_its_v_so_have_the_scales() -> None:
    caches = [torch.full((3, 2, 4, 8), 12.0, dtype=torch.bfloat16)]

    encoded = CONVERSIONS[WireFormat.BF16, WireFormat.FP8_E4M3].encode(
        caches, [2, 0], ((1.0, 2.0),), by_slot=True
    )

    slots = encoded.wire.view(torch.float8_e4m3fn).float().view(2, 2, 4, 2, 4)
    assert slots[..., 0, :].eq(12).all()
    assert slots[..., 1, :].eq(6).all()


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_k_and_v_of_each_layer_have_scales_of_their_own(source: torch.dtype) -> None:
    caches = [torch.full((3, 2, 4, 8), 12.0, dtype=source) for _ in range(2)]
    have = WireFormat.FP32 if source is torch.float32 else WireFormat.BF16
    scales: Scales = ((1.0, 2.0), (3.0, 4.0))

    wire = CONVERSIONS[have, WireFormat.FP8_E4M3].encode(caches, [2, 0], scales).wire

    halves = (
        wire.view(torch.float8_e4m3fn).float().view(2, 2, 2, 2, 16)
    )  # layer, page, head, K or V, elements
    assert halves[0, :, :, 0].eq(12).all()
    assert halves[0, :, :, 1].eq(6).all()
    assert halves[1, :, :, 0].eq(4).all()
    assert halves[1, :, :, 1].eq(3).all()


def test_float32_becomes_bfloat16_and_what_is_too_large_the_largest() -> None:
    largest = torch.finfo(torch.float32).max
    cache = torch.tensor([1.00390625, 1.01171875, largest, -largest] * 8).view(1, 1, 4, 8)

    wire = CONVERSIONS[WireFormat.FP32, WireFormat.BF16].encode([cache], [0], ()).wire

    top = torch.finfo(torch.bfloat16).max
    assert wire.view(torch.bfloat16)[:4].tolist() == [1.0, 1.015625, top, -top]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pair", sorted(CONVERSIONS))
def test_what_is_no_number_is_refused_by_layer_and_page(
    pair: tuple[WireFormat, WireFormat], bad: float
) -> None:
    dtype = torch.float32 if pair[0] is WireFormat.FP32 else torch.bfloat16
    caches = [torch.zeros((6, 2, 4, 8), dtype=dtype) for _ in range(2)]
    caches[1][4, 1, 2, 3] = bad

    with pytest.raises(NonfiniteSource) as refused:
        CONVERSIONS[pair].encode(caches, [5, 4, 0], ())
    assert (refused.value.layer, refused.value.page) == (1, 4)
    CONVERSIONS[pair].encode(caches, [5, 0], ())  # pages that are not wanted do not matter


def test_converted_pages_land_in_the_receivers_cache() -> None:
    source = [torch.randn(6, 2, 4, 8, dtype=torch.bfloat16) for _ in range(2)]
    target = [torch.zeros(6, 2, 4, 8, dtype=torch.uint8) for _ in range(2)]

    wire = CONVERSIONS[WireFormat.BF16, WireFormat.FP8_E4M3].encode(source, [3, 1], ()).wire
    assert wire.numel() == 2 * NARROW.page_bytes == CPU.page_bytes
    CODECS[WireFormat.FP8_E4M3].decode(wire, target, [0, 5])

    for layer in range(2):
        read = target[layer].view(torch.float8_e4m3fn).float()
        for at, origin in ((0, 3), (5, 1)):
            assert torch.equal(read[at], source[layer][origin].to(torch.float8_e4m3fn).float())
        assert read[1:5].eq(0).all()


def test_every_conversion_that_is_promised_exists_and_no_other() -> None:
    promised = {(have, wanted) for have, targets in CONVERTIBLE.items() for wanted in targets}

    assert set(CONVERSIONS) == promised
    assert all(have != wanted for have, wanted in promised)


def gpu(format: WireFormat, isa: str = "native") -> Layout:
    return Layout(layers=2, heads=2, block_size=4, content=8, format=format, interior=f"cuda/{isa}")


@pytest.mark.parametrize(
    ("have", "wanted", "scales", "why"),
    [
        (CPU, CPU, (), ""),
        (CPU, NARROW, (), ""),
        (CPU, NARROW, ((1.0, 2.0), (1.0, 1.0)), ""),
        (NARROW, CPU, (), "format: fp8_e4m3 != bf16"),
        (CPU, gpu(WireFormat.FP8_E4M3), (), "interior: cpu/vec != cuda/native"),
        (CPU, NARROW, ((1.0, 1.0),), "scales of 1 layers for 2"),
        (CPU, NARROW, ((1.0, 0.0), (1.0, 1.0)), "no positive number"),
        (CPU, NARROW, ((1.0, 1.0), (float("nan"), 1.0)), "no positive number"),
        (CPU, NARROW, ((1.0, 1.0), (float("inf"), 1.0)), "no positive number"),
        (gpu(WireFormat.BF16), gpu(WireFormat.FP8_E4M3), ((2.0, 2.0), (1.0, 1.0)), ""),
        (
            gpu(WireFormat.BF16),
            gpu(WireFormat.FP8_E4M3),
            ((2.0, 1.0), (1.0, 1.0)),
            "cuda/native is not known",
        ),
        (
            gpu(WireFormat.BF16, "by_slot"),
            gpu(WireFormat.FP8_E4M3, "by_slot"),
            ((2.0, 1.0), (1.0, 1.0)),
            "",
        ),
        (NARROW, NARROW, (), ""),
    ],
)
def test_pages_fit_or_the_difference_is_named(have: Layout, wanted: Layout, scales: Scales, why: str) -> None:
    found = misfit(have, wanted, scales)

    assert why in found
    assert bool(found) == bool(why)


def test_a_conversion_that_cuts_off_would_be_noticed() -> None:
    """The stock CPU kernel writes so; the comparison above is known to see it."""
    cache = every_finite_bf16()
    pages = list(range(len(cache)))
    rounded = CONVERSIONS[WireFormat.BF16, WireFormat.FP8_E4M3].encode([cache], pages, ())
    nearest = rounded.wire.view(torch.float8_e4m3fn).float()
    larger = (nearest.abs() > cache.float().abs().reshape(-1).clamp(max=448)).sum()

    assert larger > 1000  # truncation toward zero never gives a larger number


@pytest.mark.parametrize(
    ("own", "scales", "why"),
    [
        ((), (), ""),
        ((), ((1.0, 1.0), (1.0, 1.0)), ""),
        (((0.5, 2.0), (1.0, 3.0)), ((0.5, 2.0), (1.0, 3.0)), ""),
        (((0.5, 0.5), (0.5, 0.5)), (), "scales of K and V in layer 0: (0.5, 0.5) != (1.0, 1.0)"),
        ((), ((1.0, 1.0), (1.0, 0.5)), "scales of K and V in layer 1: (1.0, 1.0) != (1.0, 0.5)"),
        (((1.0, 1.0), (1.0, float("nan"))), ((1.0, 1.0), (1.0, float("nan"))), "nan"),
        (((2.0, 2.0),), ((2.0, 2.0), (2.0, 2.0)), "scales of 1 layers for 2"),
    ],
)
def test_bytes_are_kept_only_where_both_kernels_read_the_same_in_them(
    own: Scales, scales: Scales, why: str
) -> None:
    found = misfit(NARROW, NARROW, scales, own)

    assert why in found
    assert bool(found) == bool(why)
    assert not found or found.endswith(f"(prefill: {NARROW}; decode: {NARROW})")


def test_scales_of_caches_that_have_none_do_not_matter() -> None:
    assert misfit(CPU, CPU, (), ((0.5, 0.5), (0.5, 0.5))) == ""
