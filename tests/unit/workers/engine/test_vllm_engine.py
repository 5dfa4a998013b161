from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api import (
    HandoffOutcome,
    HandoffReport,
    IntegrityCause,
    LayerScales,
    PageFault,
    ScaleFile,
    ScaleFileError,
    WireFormat,
    encode_scale_file,
    scale_file_sha256,
)
from tests.unit.workers.profile.test_vllm_args import a_profile
from workers.api import FaultKind, Phase
from workers.engine.base import EngineFault
from workers.engine.vllm_engine import (
    _cache_settings,
    _raise_if_failed,
    _refuse_unfit,
    capability_here,
    local_hit,
)
from workers.profile.schema import parse_profile
from workers.profile.vllm_args import Device

BLOCK = 16


def test_without_a_transfer_every_cached_token_is_an_own_hit() -> None:
    assert local_hit(48, None, BLOCK) == 48
    assert local_hit(47, HandoffReport(outcome=HandoffOutcome.NOTHING_MISSING), BLOCK) == 47


def test_a_failed_transfer_claims_no_hit() -> None:
    assert local_hit(48, HandoffReport(outcome=HandoffOutcome.RECOMPUTED), BLOCK) == 0


@pytest.mark.parametrize("last_page_used", [1, 15, 16])
@given(own=st.integers(0, 20), came=st.integers(1, 20))
def test_pages_that_came_are_not_own_hits(last_page_used: int, own: int, came: int) -> None:
    cached = (own + came - 1) * BLOCK + last_page_used
    report = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=came)

    assert local_hit(cached, report, BLOCK) == own * BLOCK


def test_a_request_that_ended_for_a_wrong_page_says_which_and_why() -> None:
    fault = PageFault(IntegrityCause.FREED, 7, 0x10, 0x20)
    ended = SimpleNamespace(
        outputs=[SimpleNamespace(finish_reason="error")], kv_transfer_params=fault.to_params()
    )

    with pytest.raises(EngineFault, match="freed: page 7 has tag 0x20, expected 0x10") as raised:
        _raise_if_failed(ended)

    assert raised.value.kind is FaultKind.PAGE_INTEGRITY
    assert raised.value.page_fault == fault


@pytest.mark.vllm
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("capability", "said"),
    [
        (None, "decode: there is no NVIDIA GPU here"),
        ((8, 0), "decode.weight_format: weights in fp8 need a GPU of compute capability 8.9"),
    ],
)
def test_an_engine_for_cuda_does_not_start_where_the_gpu_cannot_do_its_formats(
    capability: tuple[int, int] | None, said: str
) -> None:
    profile = a_profile(decode={"gpu": "h200", "weight_format": "fp8"})

    with pytest.raises(EngineFault, match=said) as raised:
        _refuse_unfit(profile, Phase.DECODE, lambda: capability)

    assert raised.value.kind is FaultKind.ENGINE_DEAD
    _refuse_unfit(profile, Phase.PREFILL, lambda: (8, 0))


@pytest.mark.vllm
@pytest.mark.timeout(120)
def test_of_a_machine_without_a_gpu_vllm_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")

    assert capability_here() is None


def settings(device: Device, **decode: Any) -> dict[str, Any]:
    raw = {
        "name": "own",
        "model_id": "own",
        "weights": {"path": "/m"},
        "context_length": 64,
        "decode": decode,
    }
    return _cache_settings(parse_profile(raw, source="test"), Phase.DECODE, device)


@pytest.mark.parametrize(
    ("device", "decode", "rounded"),
    [
        ("cpu", {}, False),
        ("cpu", {"kv_format": "fp8_e4m3"}, True),
        ("cpu", {"kv_format": "fp8_e5m2", "kv_writes": "nearest"}, True),
        ("cpu", {"kv_format": "fp8_e4m3", "kv_writes": "stock"}, False),
        ("cuda", {"kv_format": "fp8_e4m3"}, False),  # kernels there round by themselves
    ],
)
def test_an_engine_on_cpu_rounds_what_it_writes_to_an_fp8_cache(
    device: Device, decode: dict[str, Any], rounded: bool
) -> None:
    assert settings(device, **decode) == {"rounded_writes": rounded}


def test_an_engine_is_told_its_scale_file_and_which_bytes_it_held(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    file = ScaleFile(
        version=1,
        format=WireFormat.FP8_E4M3,
        source_revision=None,
        layers=(LayerScales(name="a", k=0.5, v=2.0),),
    )
    with pytest.raises(ScaleFileError, match=r"^decode.kv_scales: "):
        settings("cpu", kv_format="fp8_e4m3", kv_scales=str(path))
    path.write_bytes(encode_scale_file(file))

    told = settings("cpu", kv_format="fp8_e4m3", kv_scales=str(path))

    assert told["scale_file"] == str(path)
    assert told["scale_sha256"] == scale_file_sha256(path)
