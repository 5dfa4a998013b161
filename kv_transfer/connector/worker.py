"""vLLM's CPU worker, with what the connector cannot see by itself: its runner, and what runs before."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer.connector.checked_worker import CheckedWorker, settings
from kv_transfer.connector.rounded import require_rounded, round_writes


class PhasegateCPUWorker(CheckedWorker, CPUWorker):
    def load_model(self, **options: Any) -> None:
        if settings(self.vllm_config).rounded_writes:
            round_writes()
        super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        if settings(self.vllm_config).rounded_writes:
            layers = self.vllm_config.compilation_config.static_forward_context
            require_rounded(layers, self.cache_config.block_size, self.model_config.dtype)
        return super().compile_or_warm_up_model()
