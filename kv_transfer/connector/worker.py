"""vLLM's CPU worker, with what the connector cannot see by itself: its runner, and what runs before."""

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer.connector.checked_worker import CheckedWorker


class PhasegateCPUWorker(CheckedWorker, CPUWorker):
    pass
