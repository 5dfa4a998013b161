"""What is told with a request's first output: how long it queued, and how its pages came.

vLLM tells such things when a request ends, which one that is aborted after its answer never does. Called by
the scheduler only, on the engine's thread.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from kv_transfer.api.handoff import HandoffReport, StartReport


class Output(Protocol):
    """The part of vLLM's `EngineCoreOutput` that is used here."""

    request_id: str
    new_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None


class FirstOutputs:
    """Requests that have given no output yet, with their times."""

    def __init__(
        self, report_of: Callable[[str], HandoffReport | None], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._report_of = report_of
        self._now = now
        self._added: dict[str, float] = {}
        self._queued: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._added) + len(self._queued)

    def added(self, request_id: str) -> None:
        self._added[request_id] = self._now()

    def scheduled(self, request_ids: Iterable[str]) -> None:
        """These are in the step that is about to be computed."""
        for request_id in request_ids:
            added = self._added.pop(request_id, None)
            if added is not None:
                self._queued[request_id] = self._now() - added

    def tell(self, outputs: Iterable[Output], alive: Mapping[str, object]) -> None:
        """Put the report into the first output with a token of each request, beside what is there.

        Args:
            alive: requests that the scheduler still knows; the others will give no output.
        """
        if not len(self):
            return
        for output in outputs:
            if output.new_token_ids and (queued := self._queued.pop(output.request_id, None)) is not None:
                start = StartReport(queued_s=queued, handoff=self._report_of(output.request_id))
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), **start.to_params()}
        if len(self) > len(alive):  # aborted ones among them: as rarely as this keeps the number bounded
            for waiting in (self._added, self._queued):
                for request_id in waiting.keys() - alive.keys():
                    del waiting[request_id]
