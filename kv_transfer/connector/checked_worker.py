"""What every worker of vLLM's gets for the check: its runner is made known, and steps are prepared."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.worker_base import WorkerBase

from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.connector.guard import orders_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class CheckedWorker(WorkerBase):
    """Stands before a worker class of vLLM's."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        connector().bind_runner(self.model_runner)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        prepare(scheduler_output)
        return super().execute_model(scheduler_output)


def prepare(step: "SchedulerOutput") -> None:
    """Bring the check up to date, and leave in the step what it may clear and copy."""
    orders = orders_of(step)
    if orders is not None:
        clear, copies = connector().before_step(
            orders,
            step.new_block_ids_to_zero or (),
            [tuple(pair) for pair in step.kv_cache_block_copies or ()],
        )
        step.new_block_ids_to_zero = clear or None
        step.kv_cache_block_copies = [KVCacheBlockCopy(*pair) for pair in copies] or None


def connector() -> PhasegateConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, PhasegateConnector)
    return connector
