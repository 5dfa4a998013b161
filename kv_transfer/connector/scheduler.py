"""vLLM's schedulers, with what the connector cannot learn or tell by itself: the queues' lengths, what is
known of a request when its first token is there, and the end of requests whose pages are not their own."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.api.integrity import PageFault
from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.connector.first_outputs import FirstOutputs
from kv_transfer.connector.guard import orders_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Telling(Scheduler):
    """Adds to vLLM's scheduler; decides nothing itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector
        assert isinstance(connector, PhasegateConnector)
        self._preemptions = 0
        connector.bind_counts(self._counts)
        self._first_outputs = FirstOutputs(connector.report_of)
        self._guard = connector.guard
        self._faults = connector.step_faults
        self._ending: dict[str, PageFault] = {}
        """Requests that end with the step that is being taken in."""

    def add_request(self, request: "Request") -> None:
        self._first_outputs.added(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        self._faults.before(self)
        output = super().schedule(*args, **kwargs)
        self._first_outputs.scheduled(new.req_id for new in output.scheduled_new_reqs)
        self._preemptions += len(output.preempted_req_ids or ())
        return output

    def _counts(self) -> tuple[int, int, int]:
        """For the gauges' thread."""
        return *self.get_request_counts(), self._preemptions

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: "SchedulerOutput") -> Any:
        spoiled = self._faults.in_step(self, scheduler_output)
        check = self._guard.before_step(self, scheduler_output)
        metadata = super()._build_kv_connector_meta(connector, scheduler_output)
        metadata.check, metadata.spoiled = check, spoiled
        self._faults.told(self, metadata)
        if (check is not None or self._faults.active) and scheduler_output.total_num_scheduled_tokens:
            scheduler_output.has_sync_kv_loads = True  # the connector comes before the forward
        return metadata

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        self._end_flagged(scheduler_output, model_runner_output)
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for outputs in by_client.values():
            self._first_outputs.tell(outputs.outputs, self.requests)
            for output in outputs.outputs:
                if (fault := self._ending.get(output.request_id)) is not None:
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), **fault.to_params()}
        return by_client

    def _end_flagged(self, step: "SchedulerOutput", result: "ModelRunnerOutput") -> None:
        """vLLM drops the tokens of requests whose pages did not arrive, and ends those without a grammar."""
        told = result.kv_connector_output
        check = orders_of(step)
        self._guard.after_step(self, check, told.kv_connector_worker_meta if told is not None else None)
        self._ending = self._guard.ending(self)
        if self._ending:
            self.grammar_compile_error_reqs |= self._ending.keys()
            if told is not None:
                told.failed_recving = {*(told.failed_recving or ()), *self._ending}
        if check is not None and check.emptied and self.defer_block_free:
            # vLLM counted the step when it was scheduled, and does not when it is done: nothing is in it.
            self.processed_step_seq += 1
            self._drain_deferred_frees()

    def _drain_deferred_frees(self) -> None:
        self._guard.before_pages_go_back(self)
        super()._drain_deferred_frees()

    def _handle_failed_recving(self, failed_req_ids: set[str]) -> set[str]:
        ending = failed_req_ids & self._ending.keys()
        failed: set[str] = super()._handle_failed_recving(failed_req_ids - ending)
        return failed | ending


class PhasegateScheduler(_Telling):
    pass


class PhasegateAsyncScheduler(_Telling, AsyncScheduler):
    pass
