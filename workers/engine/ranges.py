"""How large the keys and values of a model are: measured in the engine itself, on their way to the cache."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from workers.api import Phase
from workers.profile.schema import ModelProfile
from workers.profile.vllm_args import Device, engine_environment, measuring_args

Ranges = dict[str, tuple[float, float]]
"""By the name of the layer, in the model's order: largest absolute key, and value."""


class UnmeasuredModel(ValueError):
    """The model keeps something else than keys and values in its cache. The message names the layer."""


class RangeWatch:
    """What vLLM's worker gets in addition."""

    vllm_config: Any

    def watch_ranges(self) -> None:
        self.watched_ranges = watch(self.vllm_config.compilation_config.static_forward_context)

    def ranges_seen(self) -> list[tuple[str, float, float]]:
        return [(name, float(seen[0]), float(seen[1])) for name, seen in self.watched_ranges.items()]


def measure(
    profile: ModelProfile, model_dir: str, prompts: Sequence[Sequence[int]], *, device: Device
) -> Ranges:
    """Compute the prompts with the weights and precision of prefill, in an engine of this process.

    Raises:
        UnmeasuredModel
    """
    os.environ.update(engine_environment(profile, Phase.PREFILL, device, "127.0.0.1"))
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**measuring_args(profile, model_dir, device=device)))
    try:
        engine.collective_rpc("watch_ranges")
        for number, ids in enumerate(prompts):
            params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": list(ids)}, params)
        while engine.has_unfinished_requests():
            engine.step()
        ranks = engine.collective_rpc("ranges_seen")
    finally:
        engine.engine_core.shutdown()
    return over_ranks(ranks)


def over_ranks(ranks: Sequence[Sequence[tuple[str, float, float]]]) -> Ranges:
    """Each rank has its own heads of every layer."""
    seen: Ranges = {}
    for rank in ranks:
        for name, k, v in rank:
            before = seen.get(name, (0.0, 0.0))
            seen[name] = (_larger(before[0], k), _larger(before[1], v))
    return seen


def _larger(a: float, b: float) -> float:
    return b if b > a or math.isnan(b) else a  # NaN stays


def watch(layers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """[K, V] of each layer, kept up to date from now on, on the layer's device.

    Args:
        layers: all of vLLM's `static_forward_context`.

    Raises:
        UnmeasuredModel
    """
    from vllm.model_executor.layers.attention import Attention

    watched: dict[str, torch.Tensor] = {}
    for name, layer in layers.items():
        if not hasattr(layer, "_k_scale"):
            continue
        if not isinstance(layer, Attention):
            raise UnmeasuredModel(f"{name}: {type(layer).__name__} keeps no keys and values")
        watched[name] = torch.zeros(2, device=layer._k_scale.device)
        layer.register_forward_pre_hook(partial(_note, watched[name]))
    return watched


def _note(seen: torch.Tensor, _layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    _, key, value, *_ = inputs
    found = torch.stack([key.abs().amax(), value.abs().amax()]).to(seen.dtype)
    torch.maximum(seen, found, out=seen)  # NaN stays
