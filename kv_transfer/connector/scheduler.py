"""vLLM's schedulers, with the one thing that the connector cannot learn by itself: the queue lengths."""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kv_transfer.connector.facade import PhasegateConnector


def _bind(scheduler: Scheduler) -> None:
    connector = scheduler.connector
    if isinstance(connector, PhasegateConnector):
        connector.bind_counts(scheduler.get_request_counts)


class PhasegateScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _bind(self)


class PhasegateAsyncScheduler(AsyncScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _bind(self)
