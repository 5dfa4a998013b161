"""Pages that become another format on their way, between two worker halves with a real link."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.handoff import HandoffOutcome
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.api.page import Scales, WireFormat
from kv_transfer.codec import Encoded
from kv_transfer.codec.narrow import narrow_torch
from kv_transfer.connector.layout import read_layout
from tests.support.worker_pair import (
    BLOCK,
    PROMPT,
    Worker,
    announced,
    asked,
    computed,
    some_steps,
    until,
    worker,
)

SCALES: Scales = ((0.5, 2.0), (1.0, 3.0))
FP8 = {"dtype": torch.uint8, "cache_dtype": "fp8_e4m3", "scales": SCALES}
BF16 = {"dtype": torch.bfloat16}


@contextmanager
def workers(folder: Path, prefill: dict[str, Any], decode: dict[str, Any]) -> Iterator[tuple[Worker, Worker]]:
    pair = worker("prefill", folder, **prefill), worker("decode", folder, **decode)
    try:
        yield pair
    finally:
        for each in pair:
            each.side.close()


def fill(prefill: Worker, pages: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    for cache in prefill.caches.values():
        for page in pages:
            cache[page] = torch.randn(cache.shape[1:], generator=generator).mul(40).to(cache.dtype)


def ship(
    prefill: Worker, decode: Worker, name: str, source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    prefill.step(announced(name))
    decode.step(asked(name, prefill, target))
    prefill.step(computed(name, source, PROMPT))
    until((prefill, decode), lambda: f"d-{name}" in decode.received)


def test_a_bf16_cache_fills_an_fp8_cache_with_its_scales_in_half_the_bytes(tmp_path: Path) -> None:
    with workers(tmp_path, BF16, FP8) as (prefill, decode):
        fill(prefill, (3, 4, 5))
        ship(prefill, decode, "t", (3, 4, 5), (7, 8, 9))

    for layer, (k, v) in zip(("layer0", "layer1"), SCALES, strict=True):
        wide = prefill.caches[layer][[3, 4, 5]].float().view(3, 1, 2, -1)
        scaled = wide / torch.tensor([k, v])[:, None]
        reference = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).view(3, 1, BLOCK, 8)
        assert torch.equal(decode.caches[layer][[7, 8, 9]], reference)
        assert not decode.caches[layer][:7].any()
    report = decode.reports["d-t"]
    assert (report.outcome, report.pages, report.wire_bytes) == (HandoffOutcome.SHIPPED, 3, 3 * 2 * BLOCK * 8)


def test_a_float32_cache_fills_a_bf16_cache(tmp_path: Path) -> None:
    with workers(tmp_path, {}, BF16) as (prefill, decode):
        fill(prefill, (3, 4, 5))
        ship(prefill, decode, "t", (3, 4, 5), (7, 8, 9))

    for layer, cache in decode.caches.items():
        assert torch.equal(cache[[7, 8, 9]], prefill.caches[layer][[3, 4, 5]].bfloat16())
    assert decode.reports["d-t"].wire_bytes == 3 * 2 * BLOCK * 8 * 2


@pytest.mark.parametrize("integrity", [True, False])
def test_a_page_that_holds_no_numbers_ends_its_request_and_no_other(tmp_path: Path, integrity: bool) -> None:
    with workers(tmp_path, BF16, {**FP8, "integrity": integrity}) as (prefill, decode):
        fill(prefill, (3, 4, 5, 10, 11, 12))
        prefill.caches["layer1"][4, 0, 2, 3] = float("nan")
        ship(prefill, decode, "bad", (3, 4, 5), (7, 8, 9))
        ship(prefill, decode, "good", (10, 11, 12), (1, 2, 6))

    assert decode.reports["d-bad"].cause is TransferCause.NONFINITE_SOURCE
    assert decode.reports["d-good"].outcome is HandoffOutcome.SHIPPED
    assert decode.caches["layer0"][[1, 2, 6]].any()
    assert not decode.caches["layer0"][[7, 8, 9]].any()
    assert prefill.refused == [IntegrityCause.NONFINITE_SOURCE]
    # Without integrity no request is ended: decode computes the prompt, and its kernel writes what it will.
    fault = PageFault(IntegrityCause.NONFINITE_SOURCE, -1, 0, 0)
    assert decode.faults == ({"d-bad": fault} if integrity else {})
    assert decode.failed == (set() if integrity else {"d-bad"})


class Behind:
    """As on CUDA: what holds no numbers is known when the bytes are about to leave, and not before."""

    def encode(
        self,
        caches: Sequence[torch.Tensor],
        page_ids: Sequence[int],
        scales: Scales,
        *,
        by_slot: bool = False,
    ) -> Encoded:
        wire, flaws = narrow_torch(caches, page_ids, WireFormat.FP8_E4M3, scales, by_slot=by_slot)
        return Encoded(wire, tuple(page_ids), flaws)


@pytest.mark.parametrize("flawed", [3, 5], ids=["first", "last"])
def test_what_is_known_behind_the_host_ends_its_request_before_a_byte_of_it_leaves(
    tmp_path: Path, flawed: int
) -> None:
    """Page 3 leaves alone, the others after it: none may follow it, and none that left is taken."""
    behind = {**BF16, "conversions": {(WireFormat.BF16, WireFormat.FP8_E4M3): Behind()}}
    with workers(tmp_path, behind, FP8) as (prefill, decode):
        fill(prefill, (3, 4, 5, 10, 11, 12))
        prefill.caches["layer1"][flawed, 0, 2, 3] = float("inf")
        prefill.step(announced("bad"))
        decode.step(asked("bad", prefill, (7, 8, 9)))
        until((prefill, decode), prefill.side._running().sender.wanted)
        prefill.step(computed("bad", (3, 4, 5), BLOCK))
        prefill.step(computed("bad", (3, 4, 5), PROMPT))
        until((prefill, decode), lambda: "d-bad" in decode.received)
        ship(prefill, decode, "good", (10, 11, 12), (1, 2, 6))
        some_steps(prefill, decode)

    assert decode.reports["d-bad"].cause is TransferCause.NONFINITE_SOURCE
    assert decode.faults == {"d-bad": PageFault(IntegrityCause.NONFINITE_SOURCE, -1, 0, 0)}
    assert decode.reports["d-good"].outcome is HandoffOutcome.SHIPPED
    assert not decode.caches["layer0"][[7, 8, 9]].any()
    assert prefill.refused == [IntegrityCause.NONFINITE_SOURCE]


HALF: Scales = ((0.5, 0.5), (0.5, 0.5))


@pytest.mark.parametrize(
    ("have", "wanted", "named"),
    [
        (BF16, {"dtype": torch.float16}, "format: bf16 != fp16"),
        ({**FP8, "scales": HALF}, {**FP8, "scales": ()}, "layer 0: (0.5, 0.5) != (1.0, 1.0)"),
        (FP8, {**FP8, "scales": (SCALES[0], (1.0, 1.0))}, "layer 1: (1.0, 3.0) != (1.0, 1.0)"),
        (FP8, {**FP8, "scales": SCALES[:1]}, "scales of 2 layers for 1"),
        (FP8, {**FP8, "cache_dtype": "fp8_e5m2"}, "format: fp8_e4m3 != fp8_e5m2"),
        (FP8, BF16, "format: fp8_e4m3 != bf16"),
        (BF16, {}, "format: bf16 != fp32"),
        (BF16, {**FP8, "scales": SCALES[:1]}, "scales of 1 layers for 2"),
    ],
    ids=[
        *("bf16 as fp16", "scale 0.5 as 1", "a scale of one layer", "scales of fewer layers"),
        *("e4m3 as e5m2", "wider", "wider still", "scales that do not reach"),
    ],
)
def test_what_cannot_be_made_of_a_cache_is_refused_with_both_layouts_and_never_taken_for_it(
    tmp_path: Path, have: dict[str, Any], wanted: dict[str, Any], named: str
) -> None:
    with workers(tmp_path, have, wanted) as (prefill, decode):
        fill(prefill, (3, 4, 5))
        ship(prefill, decode, "t", (3, 4, 5), (7, 8, 9))
        layouts = [
            str(read_layout(each.caches, isa="test", cache_dtype=of.get("cache_dtype", "auto")))
            for each, of in ((prefill, have), (decode, wanted))
        ]

    report = decode.reports["d-t"]
    assert report.cause is TransferCause.LAYOUT_MISMATCH
    assert named in report.detail
    assert report.detail.endswith(f"(prefill: {layouts[0]}; decode: {layouts[1]})")
    assert decode.failed == {"d-t"}
    assert not any(cache.any() for cache in decode.caches.values())


def test_bytes_of_the_same_format_and_scales_are_shipped_as_they_are(tmp_path: Path) -> None:
    with workers(tmp_path, FP8, FP8) as (prefill, decode):
        fill(prefill, (3, 4, 5))
        ship(prefill, decode, "t", (3, 4, 5), (7, 8, 9))

    for layer, cache in decode.caches.items():
        assert torch.equal(cache[[7, 8, 9]], prefill.caches[layer][[3, 4, 5]])
    assert decode.reports["d-t"].outcome is HandoffOutcome.SHIPPED
