"""vLLM's CPU worker, with what the connector cannot see by itself: its runner, and what runs before."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.connector.guard import orders_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class PhasegateCPUWorker(CPUWorker):
    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        _connector().bind_runner(self.model_runner)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        orders = orders_of(scheduler_output)
        if orders is not None:
            clear, copies = _connector().before_step(
                orders,
                scheduler_output.new_block_ids_to_zero or (),
                [tuple(pair) for pair in scheduler_output.kv_cache_block_copies or ()],
            )
            scheduler_output.new_block_ids_to_zero = clear or None
            scheduler_output.kv_cache_block_copies = [KVCacheBlockCopy(*pair) for pair in copies] or None
        return super().execute_model(scheduler_output)


def _connector() -> PhasegateConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, PhasegateConnector)
    return connector
