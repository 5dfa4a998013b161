"""An engine's scales are those of a file: set once the weights are loaded, before anything is written.

What peers are told is read off the layers afterwards (`facade.scales_of`), never from the file: that is what
kernels use.
"""

from collections.abc import Mapping
from typing import Any

from kv_transfer.api.page import WireFormat
from kv_transfer.api.scales import ScaleFile


class UnusableScales(ValueError):
    """This engine cannot have the scales of that file. The message says why."""


def attention_layers(layers: Mapping[str, Any]) -> dict[str, Any]:
    """Those with a cache of their own kind of scales, in the model's order."""
    return {name: layer for name, layer in layers.items() if hasattr(layer, "_k_scale_float")}


def set_scales(layers: Mapping[str, Any], file: ScaleFile, format: WireFormat | None) -> None:
    """
    Args:
        layers: all of vLLM's `static_forward_context`.
        format: of this engine's cache; None: one that has no scales.

    Raises:
        UnusableScales: nothing was set.
    """
    mine = attention_layers(layers)
    given = {layer.name: layer for layer in file.layers}
    if file.format is not format:
        raise UnusableScales(f"format: the file is for a cache in {file.format}, this one is in {format}")
    if unknown := [name for name in given if name not in mine]:
        raise UnusableScales(f"layers: the model has none called {unknown[0]}")
    if missing := [name for name in mine if name not in given]:
        raise UnusableScales(f"layers: {missing[0]} is missing ({len(given)} of {len(mine)} are there)")
    for name, layer in mine.items():
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            raise UnusableScales(f"layers: {name} shares the cache of another layer")
        if (layer._k_scale_float, layer._v_scale_float) != (1.0, 1.0):
            raise UnusableScales(f"layers: the checkpoint brings its own scales for {name}")
    for name, layer in mine.items():
        _set(layer, "k", given[name].k)
        _set(layer, "v", given[name].v)


def _set(layer: Any, which: str, scale: float) -> None:
    """In all three places where vLLM's backends look."""
    getattr(layer, f"_{which}_scale").fill_(scale)
    getattr(layer, f"_{which}_scale_cpu").fill_(scale)
    setattr(layer, f"_{which}_scale_float", scale)
