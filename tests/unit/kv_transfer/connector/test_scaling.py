"""An engine's layers get the scales of a file, all of them or none."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales

from kv_transfer.api import LayerScales, ScaleFile, WireFormat
from kv_transfer.connector.facade import scales_of
from kv_transfer.connector.scaling import UnusableScales, set_scales

E4M3 = WireFormat.FP8_E4M3


def a_layer(**more: Any) -> torch.nn.Module:
    """As much of vLLM's attention layer as has to do with scales."""
    layer = torch.nn.Module()
    set_default_quant_scales(layer, register_buffer=True)
    for name, value in more.items():
        setattr(layer, name, value)
    return layer


def a_model() -> dict[str, Any]:
    return {"one": a_layer(), "experts": torch.nn.Module(), "two": a_layer()}


def a_file(*names: str, format: WireFormat = E4M3) -> ScaleFile:
    layers = tuple(LayerScales(name=n, k=0.1 + i, v=2.0**-i) for i, n in enumerate(names))
    return ScaleFile(version=1, format=format, source_revision=None, layers=layers)


def test_each_layer_gets_its_scales_wherever_kernels_look() -> None:
    model = a_model()

    set_scales(model, a_file("two", "one"), E4M3)

    for name, k, v in (("two", 0.1, 1.0), ("one", 1.1, 0.5)):
        layer = model[name]
        assert (layer._k_scale_float, layer._v_scale_float) == (k, v)
        for tensor, scale in (
            (layer._k_scale, k), (layer._k_scale_cpu, k), (layer._v_scale, v), (layer._v_scale_cpu, v),
        ):  # fmt: skip
            assert tensor.item() == torch.tensor(scale).item()
    assert scales_of([model["one"], model["two"]]) == ((1.1, 0.5), (0.1, 1.0))


@pytest.mark.parametrize(
    ("model", "file", "format", "why"),
    [
        (
            a_model(),
            a_file("one", "two"),
            WireFormat.FP8_E5M2,
            "for a cache in fp8_e4m3, this one is in fp8_e5m2",
        ),
        (a_model(), a_file("one", "two"), None, "this one is in None"),
        (a_model(), a_file("one", "two", "three"), E4M3, "none called three"),
        (a_model(), a_file("one"), E4M3, r"two is missing \(1 of 2"),
        (
            a_model() | {"two": a_layer(_k_scale_float=0.5)},
            a_file("one", "two"),
            E4M3,
            "checkpoint brings its own",
        ),
        (
            a_model() | {"two": a_layer(kv_sharing_target_layer_name="one")},
            a_file("one", "two"),
            E4M3,
            "shares the cache",
        ),
    ],
    ids=["format", "wide cache", "unknown layer", "missing layer", "checkpoint", "shared"],
)
def test_a_file_that_is_not_for_the_engine_changes_nothing(
    model: dict[str, Any], file: ScaleFile, format: WireFormat | None, why: str
) -> None:
    with pytest.raises(UnusableScales, match=why):
        set_scales(model, file, format)

    assert model["one"]._k_scale_float == 1.0
    assert model["one"]._k_scale.item() == 1.0
