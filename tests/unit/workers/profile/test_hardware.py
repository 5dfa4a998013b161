"""A format is refused where the machine cannot do it, with the reason and what would work."""

from typing import Any

import pytest

from workers.profile.hardware import shortcomings
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import Device

OLD = frozenset({"avx2"})
NEW = frozenset({"avx2", "avx512f"})


def a_profile(**changes: Any) -> ModelProfile:
    raw = {"name": "own", "model_id": "own", "weights": {"path": "/models/own"}, "context_length": 4096}
    return parse_profile(raw | changes, source="test")


FP8 = a_profile(decode={"kv_format": "fp8_e4m3"})
SCRIPTED = a_profile(engine="scripted", decode={"kv_format": "fp8_e4m3"})


@pytest.mark.parametrize(
    ("profile", "device", "features"),
    [(FP8, "cpu", NEW), (FP8, "cuda", OLD), (a_profile(), "cpu", OLD), (SCRIPTED, "cpu", OLD)],
)
def test_what_the_machine_can_do_is_no_shortcoming(
    profile: ModelProfile, device: Device, features: frozenset[str]
) -> None:
    assert list(shortcomings(profile, device, features)) == []


def test_an_fp8_cache_on_an_older_processor_is_told_with_what_works() -> None:
    (told,) = shortcomings(FP8, "cpu", OLD)

    assert told.startswith("decode.kv_format: a cache in fp8_e4m3 needs a processor with AVX512F")
    assert "kv_format bf16" in told
