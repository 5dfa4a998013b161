"""A format is refused where the machine cannot do it, with the reason and what would work."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from workers.api import Phase
from workers.profile.hardware import (
    GPU_CAPABILITY,
    Capability,
    gpu_shortcomings,
    processor_lacks,
    shortcomings,
)
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import Device

MODELS = Path(__file__).parents[4] / "deploy" / "models"
BIG = ("kimi-k2.6", "glm-5.2", "qwen3-32b")
OLD = frozenset({"avx2"})
NEW = frozenset({"avx2", "avx512f"})
MLA = {
    "num_attention_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 64,
    "v_head_dim": 8,
}


def a_profile(**changes: Any) -> ModelProfile:
    raw = {"name": "own", "model_id": "own", "weights": {"path": "/models/own"}, "context_length": 4096}
    return parse_profile(raw | changes, source="test")


def latent(**more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8}
    return sizes | {"mla": MLA} | more


FP8 = a_profile(decode={"kv_format": "fp8_e4m3"})
SCRIPTED = a_profile(engine="scripted", decode={"kv_format": "fp8_e4m3"})
SPARSE = latent(indexer={"index_n_heads": 1, "index_head_dim": 128, "index_topk": 4})


@pytest.mark.parametrize(
    ("profile", "device", "features"),
    [
        (FP8, "cpu", NEW),
        (FP8, "cuda", OLD),
        (a_profile(), "cpu", OLD),
        (SCRIPTED, "cpu", OLD),
        (a_profile(decode={"weight_format": "int4"}), "cpu", OLD),
        (a_profile(decode={"weights": {"path": "/models/other"}}), "cpu", OLD),
    ],
)
def test_what_the_machine_can_do_is_no_shortcoming(
    profile: ModelProfile, device: Device, features: frozenset[str]
) -> None:
    assert list(shortcomings(profile, device, features)) == []
    assert list(processor_lacks(profile, device, features)) == []


def test_an_fp8_cache_on_an_older_processor_is_told_with_what_works() -> None:
    (told,) = shortcomings(FP8, "cpu", OLD)

    assert told.startswith("decode.kv_format: a cache in fp8_e4m3 needs a processor with AVX512F")
    assert "kv_format bf16" in told
    assert list(processor_lacks(FP8, "cpu", OLD)) == [told.partition(";")[0]]


def test_what_is_for_a_gpu_asks_nothing_of_the_processor() -> None:
    profile = a_profile(decode={"gpu": "h200", "kv_format": "fp8_e4m3"})

    (told,) = shortcomings(profile, "cpu", OLD)

    assert told.startswith("decode.gpu: ")
    assert list(processor_lacks(profile, "cpu", OLD)) == []


@pytest.mark.parametrize(
    ("change", "reason", "nearest"),
    [
        (
            {"decode": {"gpu": "h200", "tensor_parallel": 8}},
            "decode.gpu: 8 x H200 needed, and engines run on the CPU here",
            "without gpu, tensor_parallel",
        ),
        (
            {"prefill": {"weight_format": "fp8"}},
            "prefill.weight_format: weights in fp8 need a GPU",
            "int4 or bf16",
        ),
        (
            {"decode": {"weight_format": "nvfp4"}},
            "decode.weight_format: weights in nvfp4 need a GPU",
            "int4 or bf16",
        ),
        ({"tool_parser": "hermes"}, "tool_parser: answers are not parsed yet", "a profile without it"),
        (
            {"reasoning_parser": "qwen3"},
            "reasoning_parser: answers are not parsed yet",
            "a profile without it",
        ),
    ],
)
def test_what_is_for_gpus_or_not_done_yet_is_told_before_a_start_on_the_cpu(
    change: dict[str, Any], reason: str, nearest: str
) -> None:
    (told,) = shortcomings(a_profile(**change), "cpu", NEW)

    assert told.startswith(reason)
    assert nearest in told.partition("the nearest that works")[2]


AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("format_", "refused", "taken", "needed", "nearest"),
    [
        ("fp8", AMPERE, ADA, "8.9", "weight_format int4"),
        ("nvfp4", HOPPER, BLACKWELL, "10.0", "weight_format int4"),
        ("int4", (7, 0), (7, 5), "7.5", "weight_format native with dtype float16"),
        ("bf16", (7, 5), AMPERE, "8.0", "weight_format native with dtype float16"),
    ],
)
def test_weights_ask_for_a_gpu_that_computes_in_them(
    format_: str, refused: Capability, taken: Capability, needed: str, nearest: str
) -> None:
    profile = a_profile(decode={"weight_format": format_})

    (told,) = gpu_shortcomings(profile, Phase.DECODE, refused)

    have = ".".join(map(str, refused))
    assert told.startswith(
        f"decode.weight_format: weights in {format_} need a GPU of compute capability {needed}"
    )
    assert f"this one has {have}; the nearest that works here is {nearest}" in told
    assert list(gpu_shortcomings(profile, Phase.DECODE, taken)) == []
    assert list(gpu_shortcomings(profile, Phase.PREFILL, refused)) == [], "a phase answers for itself"


def test_sparse_attention_asks_for_hopper() -> None:
    profile = a_profile(geometry=SPARSE)

    (told,) = gpu_shortcomings(profile, Phase.DECODE, ADA)

    assert told.startswith("geometry.indexer: sparse attention needs a GPU of compute capability 9.0")
    assert list(gpu_shortcomings(profile, Phase.DECODE, HOPPER)) == []


@pytest.mark.parametrize(("geometry", "lines"), [(latent(), 1), (None, 0)])
def test_no_kernel_reads_a_latent_in_e5m2(geometry: dict[str, Any] | None, lines: int) -> None:
    profile = a_profile(geometry=geometry, decode={"kv_format": "fp8_e5m2"})

    told = list(gpu_shortcomings(profile, Phase.DECODE, BLACKWELL))

    assert len(told) == lines
    assert all("the nearest that works is fp8_e4m3" in line for line in told)


@pytest.mark.parametrize("name", BIG)
@pytest.mark.parametrize("phase", list(Phase))
def test_a_shipped_profile_asks_for_nothing_that_its_gpu_cannot_do(name: str, phase: Phase) -> None:
    profile = parse_profile(yaml.safe_load((MODELS / f"{name}.yaml").read_text()), source=name)
    gpu = profile.phase(phase).gpu

    assert gpu is not None
    assert list(gpu_shortcomings(profile, phase, GPU_CAPABILITY[gpu])) == []


@pytest.mark.parametrize("name", BIG)
def test_a_shipped_profile_for_gpus_is_not_started_on_a_cpu(name: str) -> None:
    profile = parse_profile(yaml.safe_load((MODELS / f"{name}.yaml").read_text()), source=name)
    told = list(shortcomings(profile, "cpu", NEW))

    assert {"prefill.gpu", "decode.gpu", "tool_parser", "reasoning_parser"} <= {
        line.partition(":")[0] for line in told
    }
