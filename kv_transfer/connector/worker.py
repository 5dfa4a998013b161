"""vLLM's CPU worker, with what the connector cannot see by itself: its runner, and what runs before."""

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kv_transfer.connector.before_step import connector, prepare

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class PhasegateCPUWorker(CPUWorker):
    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        connector().bind_runner(self.model_runner)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        prepare(scheduler_output)
        return super().execute_model(scheduler_output)
