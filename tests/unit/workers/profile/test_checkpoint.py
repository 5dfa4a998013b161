"""In which format a folder holds its weights, from configurations as they are published."""

from typing import Any

import pytest

from workers.profile.checkpoint import weight_format


def compressed(bits: int, kind: str) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind, "group_size": 32}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "format_"),
    [
        ({"torch_dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"dtype": "float16"}, None),
        ({}, None),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": compressed(4, "int")}, "int4"),
        ({"quantization_config": compressed(4, "float")}, "nvfp4"),
        ({"quantization_config": compressed(8, "float")}, "fp8"),
        ({"quantization_config": compressed(8, "int")}, None),
        # as moonshotai/Kimi-K2.6 nests it
        ({"dtype": "bfloat16", "text_config": {"quantization_config": compressed(4, "int")}}, "int4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "int4"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, None),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "nvfp4"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, None),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, None),
        ({"text_config": "text"}, None),
    ],
)
def test_a_configuration_tells_the_format(config: dict[str, Any], format_: str | None) -> None:
    assert weight_format(config) == format_


def test_of_two_the_narrower_is_most_of_the_model() -> None:
    groups = compressed(8, "float")["config_groups"] | {
        "group_1": {"weights": {"num_bits": 4, "type": "int"}}
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}

    assert weight_format(config) == "int4"
