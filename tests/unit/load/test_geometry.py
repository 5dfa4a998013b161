"""Parameters and bytes from a model's sizes, against figures that others published or measured."""

from dataclasses import fields
from typing import Any

import pytest

from load import geometry as ours
from load.geometry import GeometryError, Indexer, parse_geometry
from load.planner import read
from workers.profile import geometry as theirs

GQA: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "gqa": GQA,
}


def of(name: str) -> ours.Geometry:
    return parse_geometry(read(name)[1]["geometry"], source=name)


@pytest.mark.parametrize(
    ("name", "billions", "within"),
    [
        ("smollm2-135m", 0.134515008, 0.0),  # as torch counts them in the model itself
        ("glm-5.2", 743, 0.005),  # models/zai-org/GLM-5.2.yaml of vllm-project/recipes; without the MTP layer
        ("qwen3-32b", 32.8, 0.005),  # README.md of Qwen/Qwen3-32B
        ("kimi-k2.6", 1040, 0.015),  # 1.04 T on Lambda's page of the model, with the vision tower
    ],
)
def test_parameters_are_as_many_as_was_published(name: str, billions: float, within: float) -> None:
    assert of(name).parameters / 1e9 == pytest.approx(billions, rel=within, abs=0)


def test_glm_5_2_has_as_many_layers_with_an_indexer_as_its_configuration_lists() -> None:
    """21 `full` and 57 `shared` in `indexer_types`."""
    indexer = of("glm-5.2").indexer

    assert indexer is not None
    assert indexer.layers(78) == 21
    assert Indexer(index_n_heads=1, index_head_dim=128, index_topk=1).layers(78) == 78, (
        "every layer by default"
    )


@pytest.mark.parametrize(
    ("name", "kv_format", "bytes_"),
    [
        ("smollm2-135m", "bf16", 23_040),  # docs/results: 46,592 tokens in a GiB
        ("smollm2-135m", "fp8_e4m3", 11_520),
        ("exact", "fp32", 46_080),
        ("kimi-k2.6", "bf16", 576 * 2 * 61),
        ("kimi-k2.6", "fp8_e4m3", 576 * 61),
        ("glm-5.2", "bf16", 576 * 2 * 78 + 132 * 21),
        ("glm-5.2", "fp8_e4m3", 656 * 78 + 132 * 21),  # fp8_ds_mla: 656 bytes a token and layer
        ("qwen3-32b", "bf16", 2 * 8 * 128 * 2 * 64),
    ],
)
def test_bytes_of_a_token(name: str, kv_format: str, bytes_: int) -> None:
    assert of(name).bytes_per_token(kv_format) == bytes_


def test_heads_are_divided_among_gpus_and_a_latent_is_not() -> None:
    heads, latent = of("qwen3-32b"), of("kimi-k2.6")

    assert heads.bytes_per_token("bf16", 8) * 8 == heads.bytes_per_token("bf16", 1)
    assert heads.bytes_per_token("bf16", 16) == heads.bytes_per_token("bf16", 8), "at least one head each"
    assert latent.bytes_per_token("bf16", 8) == latent.bytes_per_token("bf16", 1)


def test_sparse_attention_reads_the_chosen_tokens_and_every_key_of_the_indexer() -> None:
    glm = of("glm-5.2")
    near, far = glm.bytes_read("bf16", 8, 2048), glm.bytes_read("bf16", 8, 8192)

    assert near == glm.bytes_per_token("bf16") * 2048
    assert far - near == glm.indexer_bytes() * (8192 - 2048)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gqa": None}, "exactly one"),
        ({"indexer": {"index_n_heads": 1, "index_head_dim": 128, "index_topk": 1}}, "goes with `mla`"),
        ({"layers": 3}, "layers"),
        ({"gqa": GQA | {"head_dim": "wide"}}, "gqa.head_dim"),
    ],
)
def test_what_is_no_model_is_refused_by_key(change: dict[str, Any], said: str) -> None:
    with pytest.raises(GeometryError, match=said):
        parse_geometry(SMALL | change, source="own")


@pytest.mark.parametrize("name", ["Gqa", "Mla", "Indexer", "Experts", "Geometry"])
def test_a_profile_names_the_sizes_that_the_plan_knows(name: str) -> None:
    """The two packages may not import each other: a profile that the one takes, the other understands."""
    mine, schema = getattr(ours, name), getattr(theirs, name)

    assert [(f.name, f.default) for f in fields(mine)] == [(f.name, f.default) for f in fields(schema)]
