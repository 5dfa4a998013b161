"""A fault on purpose: an engine that reads its pages by other scales than it has told."""

from typing import Any

from workers.engine.tether import Tether


class Skewed(Tether):
    """What vLLM's worker gets in addition."""

    vllm_config: Any

    def skew_key_scales(self, factor: float) -> int:
        """From now on. How many layers there were."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        cached = [layer for layer in layers if hasattr(layer, "_k_scale_float")]
        for layer in cached:
            layer._k_scale_float *= factor
        return len(cached)
