"""Pages survive the way through bytes, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api.page import Layout, WireFormat
from kv_transfer.codec import CODECS
from kv_transfer.connector.layout import FORMATS, UnsupportedCache, read_layout

DTYPES = {wire: dtype for dtype, wire in FORMATS.items()} | {
    WireFormat.FP8_E4M3: torch.uint8,
    WireFormat.FP8_E5M2: torch.uint8,
}


def caches(dtype: torch.dtype, pages: int, layers: int = 2) -> list[torch.Tensor]:
    size = pages * 2 * 4 * 6
    bits = torch.randint(0, 2**15, (layers, size * dtype.itemsize // 2), dtype=torch.int16)
    return list(bits.view(dtype).view(layers, pages, 2, 4, 6))


@pytest.mark.parametrize("wire_format", list(WireFormat))
@given(data=st.data())
def test_pages_land_where_they_are_told_and_nothing_else_changes(
    wire_format: WireFormat, data: st.DataObject
) -> None:
    """Compared as bits, so that NaN patterns count too."""
    dtype, codec = DTYPES[wire_format], CODECS[wire_format]
    source, target = caches(dtype, 8), caches(dtype, 8)
    before = [layer.clone() for layer in target]
    pages = data.draw(st.integers(1, 5))
    chosen = st.lists(st.integers(0, 7), min_size=pages, max_size=pages, unique=True)
    origin, destination = data.draw(chosen), data.draw(chosen)

    codec.decode(codec.encode(source, origin), target, destination)

    for layer in range(2):
        for page in range(8):
            wanted = (
                source[layer][origin[destination.index(page)]] if page in destination else before[layer][page]
            )
            assert torch.equal(target[layer][page].view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("wire_format", list(WireFormat))
def test_wire_bytes_are_what_the_layout_says(wire_format: WireFormat) -> None:
    source = caches(DTYPES[wire_format], 8)
    layout = read_layout(dict(enumerate(source)), isa="x", cache_dtype=wire_format.value)

    assert CODECS[wire_format].encode(source, [1, 2, 5]).numel() == 3 * layout.page_bytes


def test_bytes_of_another_size_are_refused_before_anything_is_written() -> None:
    target = caches(torch.float32, 4)
    before = [layer.clone() for layer in target]

    with pytest.raises(ValueError, match="2 pages need"):
        CODECS[WireFormat.FP32].decode(torch.zeros(8, dtype=torch.uint8), target, [0, 1])

    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, target, strict=True)
    )


def test_every_wire_format_has_a_codec() -> None:
    assert set(CODECS) == set(WireFormat)


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        ({}, "registered no cache"),
        ({"a": torch.zeros(2, 1, 4, 8), "b": torch.zeros(2, 2, 4, 8)}, "layers differ"),
        ({"a": [torch.zeros(2)]}, "not pages"),
        ({"a": torch.zeros(2, 4, 8)}, "dimensions"),
        ({"a": torch.zeros(2, 1, 4, 8, dtype=torch.int32)}, "no wire format"),
        ({"a": torch.zeros(2, 1, 4, 8, dtype=torch.uint8)}, "uint8 \\(auto\\) has no wire format"),
    ],
)
def test_a_cache_that_cannot_be_shipped_is_refused_with_the_reason(cache: dict, why: str) -> None:
    with pytest.raises(UnsupportedCache, match=why):
        read_layout(cache, isa="x")


def test_difference_names_each_field_that_differs_and_nothing_else() -> None:
    ours = Layout(layers=2, heads=1, block_size=4, content=8, format=WireFormat.FP32, interior="cpu/vec")
    theirs = Layout(layers=2, heads=1, block_size=4, content=8, format=WireFormat.BF16, interior="cpu/amx")

    assert ours.difference(ours) == ""
    assert ours.difference(theirs) == "format: fp32 != bf16, interior: cpu/vec != cpu/amx"
