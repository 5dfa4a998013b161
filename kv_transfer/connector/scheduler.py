"""vLLM's schedulers, with what the connector cannot learn or tell by itself: the queues' lengths, and what
is known of a request when its first token is there."""

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.connector.first_outputs import FirstOutputs

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Telling(Scheduler):
    """Adds to vLLM's scheduler; decides nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.connector
        assert isinstance(connector, PhasegateConnector)
        connector.bind_counts(self.get_request_counts)
        self._first_outputs = FirstOutputs(connector.report_of)

    def add_request(self, request: "Request") -> None:
        self._first_outputs.added(request.request_id)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> "SchedulerOutput":
        output = super().schedule(*args, **kwargs)
        self._first_outputs.scheduled(new.req_id for new in output.scheduled_new_reqs)
        return output

    def update_from_output(
        self, scheduler_output: "SchedulerOutput", model_runner_output: "ModelRunnerOutput"
    ) -> "dict[int, EngineCoreOutputs]":
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        for outputs in by_client.values():
            self._first_outputs.tell(outputs.outputs, self.requests)
        return by_client


class PhasegateScheduler(_Telling):
    pass


class PhasegateAsyncScheduler(_Telling, AsyncScheduler):
    pass
