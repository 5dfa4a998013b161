"""vLLM's CUDA worker and its second model runner, with the place where each step's tables are checked."""

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from kv_transfer.connector.checked_worker import CheckedWorker, connector
from kv_transfer.connector.device_check import tables_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


class PhasegateGPUWorker(CheckedWorker, Worker):
    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            return super()._make_model_runner()
        return CheckedRunner(self.vllm_config, self.device)


class CheckedRunner(GPUModelRunner):
    def prepare_attn(self, input_batch: "InputBatch") -> Any:
        """vLLM's, for real steps only: tables and slots lie on the device, and nothing has read them yet."""
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        connector().check_tables(input_batch.req_ids, tables_of(input_batch, block_tables, slot_mappings))
        return block_tables, slot_mappings
