"""What happens to requests, seen in the steps that a scheduler hands out."""

from collections.abc import Callable
from typing import Any


class StepWatch:
    """Requests are the engine's, one for each answer; each counts once for each thing that happens to it."""

    def __init__(self, scheduler: Any, *, fetches: Callable[[str], bool] = lambda _: False) -> None:
        """
        Args:
            fetches: whether a request's pages come from elsewhere, so that they are no prefix hit.
        """
        self._scheduler = scheduler
        self._fetches = fetches
        self._schedule = scheduler.schedule
        self.preempted: set[str] = set()
        """For want of pages."""
        self._reset: set[str] = set()
        self.hits: set[str] = set()
        self.chunked: set[str] = set()
        self.aborted = 0
        scheduler.schedule = self._watched

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        step = self._schedule(*args, **kwargs)
        self.preempted |= (step.preempted_req_ids or set()) - self._reset
        self._reset = set()
        for new in step.scheduled_new_reqs:
            if new.num_computed_tokens and not self._fetches(new.req_id):
                self.hits.add(new.req_id)
        for request_id in step.num_scheduled_tokens:
            request = self._scheduler.requests[request_id]
            if request.num_computed_tokens < request.num_prompt_tokens:
                self.chunked.add(request_id)
        return step

    def abort(self, how: Callable[[], None]) -> int:
        """Count those that `how` ends."""
        before = self._alive()
        how()
        ended = len(before - self._alive())
        self.aborted += ended
        return ended

    def reset_cache(self) -> bool:
        """Empty the prefix cache, unless somebody who does not run has pages. Preempts all, uncounted."""
        running = {request.request_id for request in self._scheduler.running}
        tables = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        if not all(r in running for table in tables for r, pages in table.req_to_blocks.items() if pages):
            return False
        self._reset |= running
        return bool(self._scheduler.reset_prefix_cache(reset_running_requests=True))

    def _alive(self) -> set[str]:
        return {r for r, request in self._scheduler.requests.items() if not request.is_finished()}
