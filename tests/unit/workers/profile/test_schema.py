from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.api import WireFormat
from workers.api import Phase
from workers.profile.schema import ModelProfile, ProfileError, dump_profile, parse_profile

MODELS = Path(__file__).parents[4] / "deploy" / "models"
EMBEDDED: dict[str, Any] = {"weights": {"embedded": "smollm2-135m"}}
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "gqa": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16},
}
INDEXER = {"index_n_heads": 1, "index_head_dim": 128, "index_topk": 4}
EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def raw(**changes: Any) -> dict[str, Any]:
    short: dict[str, Any] = {
        "name": "own",
        "model_id": "own/model",
        "weights": {"path": "/models/own"},
        "context_length": 4096,
    }
    return short | changes


def parse(**changes: Any) -> ModelProfile:
    return parse_profile(raw(**changes), source="own.yaml")


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("smollm2-135m", "bf16", "fp8_e4m3"),
        ("smollm2-135m-bf16", "bf16", "bf16"),
        ("exact", "fp32", "fp32"),
        ("scripted", "bf16", "bf16"),
    ],
)
def test_shipped_profiles_are_valid_and_cache_what_they_say(name: str, prefill: str, decode: str) -> None:
    path = MODELS / f"{name}.yaml"
    profile = parse_profile(yaml.safe_load(path.read_text()), source=path.name)

    assert profile.name == name
    assert profile.model_id == "@cf/huggingfacetb/smollm2-135m-instruct"
    assert (profile.prefill.format, profile.decode.format) == (WireFormat(prefill), WireFormat(decode))
    assert profile.aliases == ("smollm2-135m",)


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [("kimi-k2.6", "int4", "int4"), ("glm-5.2", "fp8", "int4"), ("qwen3-32b", "bf16", "fp8")],
)
def test_shipped_profiles_for_gpus_prefill_in_bf16_and_decode_in_fp8(
    name: str, prefill: str, decode: str
) -> None:
    path = MODELS / f"{name}.yaml"
    profile = parse_profile(yaml.safe_load(path.read_text()), source=path.name)

    assert (profile.prefill.format, profile.decode.format) == (WireFormat.BF16, WireFormat.FP8_E4M3)
    assert (profile.prefill.weight_format, profile.decode.weight_format) == (prefill, decode)
    assert parse_profile(dump_profile(profile), source="again") == profile
    own = prefill != decode
    assert (profile.weights_of(Phase.DECODE) != profile.weights_of(Phase.PREFILL)) is own, (
        "one folder, one format"
    )


def test_a_cache_has_a_gibibyte_unless_a_fraction_of_a_gpu_is_asked_for() -> None:
    profile = parse(decode={"gpu": "h200", "memory_fraction": 0.5}, prefill={"cache_gib": 3})

    assert (profile.prefill.cache_size_gib, profile.decode.cache_size_gib) == (3, None)
    assert parse().decode.cache_size_gib == 1


def test_four_keys_describe_an_own_model() -> None:
    profile = parse()

    assert profile.weights.path == "/models/own"
    assert (profile.prefill.replicas, profile.decode.replicas) == (1, 1)
    assert profile.decode.format is WireFormat.BF16


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"context_lenght": 1}, r"context_lenght:"),
        ({"decode": {"replica": 2}}, r"decode\.replica:"),
        ({"decode": {"replicas": 0}}, r"decode\.replicas:"),
        ({"decode": {"replicas": "2"}}, r"decode\.replicas:"),
        ({"decode": {"replicas": True}}, r"decode\.replicas:"),
        ({"prefill": {"dtype": "fp8"}}, r"prefill\.dtype:"),
        ({"prefill": {"tensor_parallel": 0}}, r"prefill\.tensor_parallel:"),
        (
            {"prefill": {"tensor_parallel": 2}},
            r"prefill: `memory_fraction` and `tensor_parallel` are of GPUs",
        ),
        (
            {"decode": {"memory_fraction": 0.8}},
            r"decode: `memory_fraction` and `tensor_parallel` are of GPUs",
        ),
        ({"decode": {"gpu": "h200", "memory_fraction": 1.1}}, r"decode\.memory_fraction:"),
        (
            {"decode": {"gpu": "h200", "memory_fraction": 0.8, "cache_gib": 3}},
            r"decode: give one of `cache_gib`",
        ),
        ({"decode": {"gpu": "t4"}}, r"decode\.gpu:"),
        ({"decode": {"weight_format": "int3"}}, r"decode\.weight_format:"),
        ({"decode": {"weights": {}}}, r"decode\.weights: give exactly one"),
        (
            EMBEDDED | {"decode": {"weight_format": "int4"}},
            r"decode\.weight_format: embedded weights are bf16",
        ),
        ({"geometry": SIZES | {"vocab_size": 0}}, r"geometry\.vocab_size:"),
        ({"geometry": SIZES | {"gqa": None}}, r"geometry: give exactly one of `gqa` and `mla`"),
        ({"geometry": SIZES | {"indexer": INDEXER}}, r"geometry: `indexer` goes with `mla`"),
        (
            {"geometry": SIZES | {"experts": EXPERTS | {"num_experts_per_tok": 9}}},
            r"geometry: experts\.num_exp",
        ),
        (
            {"geometry": SIZES | {"experts": EXPERTS | {"first_k_dense_replace": 9}}},
            r"geometry: experts\.first",
        ),
        ({"weights": {"embedded": "llama"}}, r"weights\.embedded:"),
        ({"weights": {}}, r"weights: give exactly one"),
        ({"weights": {"embedded": "smollm2-135m", "path": "/x"}}, r"weights: give exactly one"),
        ({"model_id": "../../etc"}, r"model_id:"),
        ({"name": "a/b"}, r"name:"),
        ({"block_size": 24}, r"block_size:"),
        ({"aliases": ["own/model"]}, r"aliases:"),
        ({"tool_parser": "Not A Name"}, r"tool_parser:"),
        ({"engine": "sglang"}, r"engine:"),
        ({"decode": {"script": {}}}, r"decode\.script is for engine scripted"),
        ({"engine": "scripted", "decode": {"script": {"pages": 1}}}, r"decode\.script\.pages: 1 pages of 32"),
        ({"engine": "scripted", "prefill": {"script": {"base_ms": -1}}}, r"prefill\.script\.base_ms:"),
    ],
)
def test_a_mistake_is_reported_with_its_path(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(ProfileError, match=rf"own\.yaml:\n  (profile: )?{path}"):
        parse(**changes)


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ProfileError) as caught:
        parse(block_size=7, prefill={"threads": 0}, decode={"colour": "red"})

    for path in ("block_size:", "prefill.threads:", "decode.colour:"):
        assert path in str(caught.value)


def test_a_cache_format_that_differs_from_the_dtype_is_refused() -> None:
    with pytest.raises(ProfileError, match="decode: kv_format bf16 differs from fp32"):
        parse(decode={"dtype": "float32", "kv_format": "bf16"})


def test_sides_that_cache_in_different_formats_are_refused_naming_both() -> None:
    with pytest.raises(ProfileError, match="prefill caches bf16, decode caches fp32"):
        parse(decode={"dtype": "float32"})


@pytest.mark.parametrize(
    ("prefill", "decode", "format_"),
    [
        ({}, {"kv_format": "fp8_e4m3"}, WireFormat.FP8_E4M3),
        ({}, {"kv_format": "fp8_e5m2"}, WireFormat.FP8_E5M2),
        ({"dtype": "float32"}, {}, WireFormat.BF16),
        ({"dtype": "float32"}, {"dtype": "float32", "kv_format": "fp8_e4m3"}, WireFormat.FP8_E4M3),
    ],
)
def test_decode_may_cache_in_a_narrower_format(
    prefill: dict[str, Any], decode: dict[str, Any], format_: WireFormat
) -> None:
    profile = parse(prefill=prefill, decode=decode)

    assert profile.decode.format is format_
    assert parse_profile(dump_profile(profile), source="again") == profile


@pytest.mark.parametrize("decode", [{"dtype": "float16"}, {"dtype": "bfloat16"}])
def test_what_cannot_be_made_of_prefills_cache_is_refused(decode: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match="there is no conversion"):
        parse(prefill={"kv_format": "fp8_e4m3"}, decode=decode)


@pytest.mark.parametrize("nothing", [None, [], "text", 3])
def test_what_is_no_mapping_is_refused(nothing: object) -> None:
    with pytest.raises(ProfileError, match=r"own\.yaml"):
        parse_profile(nothing, source="own.yaml")


@given(
    context=st.integers(64, 10**6),
    pages=st.integers(1, 64),
    dtype=st.sampled_from(["bfloat16", "float32", "float16"]),
    threads=st.integers(1, 64),
)
def test_a_profile_survives_the_way_to_its_replica(
    context: int, pages: int, dtype: str, threads: int
) -> None:
    phase = {"dtype": dtype, "threads": threads, "max_sequences": pages}
    profile = parse(context_length=context, block_size=16 * pages, prefill=phase, decode=phase)

    assert parse_profile(dump_profile(profile), source="again") == profile


DENSE: dict[str, Any] = {"kv_format": "fp8_e4m3"}
FP32: dict[str, Any] = {"dtype": "float32"}


def test_engines_of_the_dense_pool_see_themselves_as_decode_with_decodes_weights() -> None:
    profile = parse_profile(
        raw(dense=DENSE, decode={"weights": {"path": "/int4"}, "weight_format": "int4"}), source="own.yaml"
    )
    theirs = profile.densest

    assert (profile.decode.format, theirs.decode.format) == (WireFormat.BF16, WireFormat.FP8_E4M3)
    assert theirs.dense is None
    assert theirs.weights_of(Phase.DECODE) == profile.weights_of(Phase.DECODE)
    assert theirs.decode.weight_format == "int4"
    assert theirs.prefill == profile.prefill
    assert parse_profile(dump_profile(theirs), source="replica") == theirs.densest == theirs


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dense": {}}, r"dense.kv_format: bf16 is not denser than decode's bf16"),
        ({"dense": DENSE, "decode": DENSE}, r"dense.kv_format: fp8_e4m3 is not denser"),
        ({"dense": DENSE | {"weights": {"path": "/other"}}}, "dense: weights are decode's"),
        ({"dense": DENSE | {"weight_format": "int4"}}, "dense: weights are decode's"),
        ({"dense": DENSE, "dense_above": 0.5}, r"dense_below 0.6 must be less than dense_above 0.5"),
        ({"dense": DENSE | {"script": {}}}, "dense.script is for engine scripted"),
        (
            {"dense": {"dtype": "float16"}, "decode": FP32, "prefill": FP32},
            "prefill caches fp32, dense caches fp16: there is no conversion",
        ),
        ({"dense_above": 1.5}, "dense_above"),
    ],
)
def test_a_dense_pool_that_is_none_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ProfileError, match=told):
        parse_profile(raw(**changes), source="own.yaml")
