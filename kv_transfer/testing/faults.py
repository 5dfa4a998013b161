"""What a broken transfer would do, for tests that must notice it; and barriers inside a transfer."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kv_transfer.api.faults import FaultConfig, PageFaultKind
from kv_transfer.connector.receiver import Outcome
from kv_transfer.testing.holds import LONGEST_S, LOOK_EVERY_S, Holds, holds_in
from kv_transfer.testing.link_faults import CorruptingLink
from kv_transfer.testing.table_faults import TableFault
from kv_transfer.transport.base import Link
from kv_transfer.transport.lane import Fence


class Faults:
    """Applied where the real thing could go wrong; does nothing without a configuration."""

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._last: Sequence[int] = ()
        self._holds = holds_in(config.holds)
        self._kept: list[Outcome] = []
        self._flip_next = threading.Event()

    def pages(self, transfer_id: str, page_ids: Sequence[int]) -> Sequence[int]:
        """The pages to gather instead of `page_ids`: with `foreign_pages`, those of an earlier group."""
        if not self._config.foreign_pages:
            return page_ids
        earlier, self._last = self._last, list(page_ids)
        if not earlier or not transfer_id.startswith(self._config.only_transfers):
            return page_ids
        return [earlier[i % len(earlier)] for i in range(len(page_ids))]

    def told(self, spoiled: Iterable[TableFault]) -> None:
        """What goes wrong in this step."""
        if any(fault.kind is PageFaultKind.CORRUPT_PAYLOAD for fault in spoiled):
            self._flip_next.set()

    def link(self, link: Link) -> Link:
        """What the link is used through."""
        return link if self._config.page_faults is None else CorruptingLink(link, self._flip_next)

    def keeps_pages(self, transfer_id: str) -> bool:
        """Barrier `ship`: pages that could leave do not, in this step."""
        return self._holds.held("ship", transfer_id)

    def fence(self, transfer_id: str, fence: Fence) -> Fence:
        """Barrier `wire`: the lane has a page group and does not send it yet."""
        if self._config.holds is None:
            return fence
        self._holds.held("wire", transfer_id)  # reached, also by those that queue behind the one that waits
        return HeldFence(fence, self._holds, transfer_id)

    def due(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Barrier `copy_in`: pages that have all arrived are not copied yet."""
        waiting, self._kept = [*self._kept, *outcomes], []
        due = []
        for outcome in waiting:
            arrived = outcome.cause is None
            if arrived and self._holds.held("copy_in", outcome.order.ticket.transfer_id):
                self._kept.append(outcome)
            else:
                due.append(outcome)
        return due


class HeldFence(Fence):
    """A fence that also waits for a barrier, on the lane's thread."""

    def __init__(
        self, fence: Fence, holds: Holds, transfer_id: str, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._fence, self._holds, self._transfer_id, self._sleep = fence, holds, transfer_id, sleep

    def withheld(self) -> bool:
        return self._fence.withheld()

    def void(self) -> bool:
        return self._fence.void()

    def wait(self) -> None:
        self._fence.wait()
        for _ in range(int(LONGEST_S / LOOK_EVERY_S)):
            if not self._holds.held("wire", self._transfer_id):
                return
            self._sleep(LOOK_EVERY_S)
