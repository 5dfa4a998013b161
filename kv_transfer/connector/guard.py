"""The ledger's part in a step: what is flagged is taken out before it is sent, and ended when it is done."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kv_transfer.api.integrity import LEDGER_CHECKS, TABLE_CHECKS, Coverage, IntegrityCause, PageFault
from kv_transfer.api.ledger import LedgerSnapshot
from kv_transfer.connector.metadata import CheckOrders, StepOrders, WorkerNews
from kv_transfer.integrity.base import NullLedger, PageLedger
from kv_transfer.integrity.causes import explain
from kv_transfer.integrity.checker import CheckCounts
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.device import Sighting
from kv_transfer.integrity.hooks import keep_lost_pages, reconcile, watch
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.misled import (
    ALL,
    Plan,
    Readers,
    Steps,
    computed_before,
    to_write,
    was_to_write,
    who_read,
)
from kv_transfer.integrity.parted import GivenBack
from kv_transfer.integrity.prestep import rights_of
from kv_transfer.integrity.tags import NO_TAG

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

log = logging.getLogger(__name__)


class Guard:
    """Beside the scheduler, in its thread; counters are read by others."""

    def __init__(self) -> None:
        self.ledger: PageLedger = NullLedger()
        self.counts = CheckCounts()
        self._manager: KVCacheManager | None = None
        self._sizes: list[int] = []
        """Tokens in a page, by cache group."""
        self._ending: dict[str, PageFault] = {}
        """Flagged requests that the scheduler still knows."""
        self._written: dict[str, int] = {}
        """Tokens that they had in their pages before: what they were to write since is not there."""
        self._found: Counter[IntegrityCause] = Counter()
        """By the worker."""
        self._under_way: dict[int, Plan] = {}
        """Steps put together whose end is not known, by number."""
        self._coming: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Pages that requests wait for, and the tags under which they were ordered."""

    def watch(self, manager: "KVCacheManager") -> None:
        """Keep a ledger of this manager's pages. Raises UnwatchablePool."""
        self.use(watch(manager), manager)

    def use(self, ledger: PageLedger, manager: "KVCacheManager") -> None:
        """A ledger that is told of this manager's pages, or one that is told nothing."""
        self.ledger = ledger
        self._manager = manager
        self._under_way = {}
        self._sizes = [group.kv_cache_spec.block_size for group in manager.kv_cache_config.kv_cache_groups]

    def mismatches(self) -> Counter[IntegrityCause]:
        """Since the engine's start."""
        return self.ledger.counts + self._found

    def snapshot(self) -> LedgerSnapshot:
        """Of the ledger that is in use now. From any thread."""
        return self.ledger.snapshot()

    def coverage(self, *, tables: bool) -> Coverage:
        """
        Args:
            tables: whether the worker checks each step's tables.
        """
        full = self.ledger.coverage()
        if tables or not full.checked:
            return full
        return replace(full, checked=LEDGER_CHECKS, unchecked=TABLE_CHECKS)

    def expect(self, request_id: str, pages: Sequence[int]) -> tuple[int, ...]:
        """The request waits for these pages to come; returns their tags."""
        tags = self.ledger.tags(pages)
        if tags:
            self._coming[request_id] = (tuple(pages), tags)
        return tags

    def gone(self, request_id: str) -> None:
        """It waits for nothing any more."""
        self._coming.pop(request_id, None)

    def before_step(self, scheduler: "Scheduler", output: "SchedulerOutput") -> CheckOrders | None:
        """Check the ledger; take flagged requests out of the step. None without a ledger."""
        ledger = self.ledger
        if not isinstance(ledger, GenerationLedger):
            return None
        assert self._manager is not None
        reconcile(ledger, scheduler)
        flagged = ledger.take_flagged()
        for request_id, fault in flagged.items():
            self._flag(scheduler, request_id, fault)
        self._ending = {r: fault for r, fault in self._ending.items() if r in scheduler.requests}
        if flagged or self._ending:
            self._end_readers(scheduler, flagged | self._ending, _plan(output))
        self._written = {r: computed for r, computed in self._written.items() if r in self._ending}
        had_some = bool(output.num_scheduled_tokens)
        copies = [tuple(pair) for pair in output.kv_cache_block_copies or ()]
        rights = rights_of(ledger, output.new_block_ids_to_zero or (), copies)
        if self._ending:
            _expel(scheduler, output, self._ending.keys())
        plan = _plan(output)
        parted = self._manager.parted
        parted.step += 1
        self._under_way[parted.step] = plan
        delta = ledger.take_delta()
        leans = _leans(ledger, delta)
        emptied = had_some and not plan
        return CheckOrders(delta, plan, rights, emptied=emptied, number=parted.step, leans=leans)

    def _end_readers(self, scheduler: "Scheduler", flagged: Mapping[str, PageFault], plan: Plan) -> None:
        """Others may have found, by their hashes, pages that these would have written: in the step in which
        they were flagged, and, with more under way, in each that is put together before they end."""
        assert self._manager is not None
        steps = {self._manager.parted.step + 1: plan}
        self._end(scheduler, {r: f for r, f in flagged.items() if r in plan or r in self._written}, steps)
        assert isinstance(self.ledger, GenerationLedger)
        for request_id, computed in self._written.items():
            self._manager.block_pool.evict_blocks(to_write(self.ledger, request_id, self._sizes, computed))

    def before_pages_go_back(self, scheduler: "Scheduler") -> None:
        """Those that waited for a step to end."""
        if isinstance(self.ledger, GenerationLedger):
            keep_lost_pages(self.ledger, scheduler)

    def after_step(self, scheduler: "Scheduler", orders: CheckOrders | None, news: object) -> None:
        """Take in what the worker found in the step of these orders."""
        if isinstance(news, WorkerNews):
            self._take_in(scheduler, orders, news)
        if orders is not None and self._manager is not None and isinstance(self.ledger, GenerationLedger):
            self._manager.parted.settled(orders.number)
            self._under_way = {n: plan for n, plan in self._under_way.items() if n > orders.number}

    def _take_in(self, scheduler: "Scheduler", orders: CheckOrders | None, news: WorkerNews) -> None:
        self.counts = news.counts
        if news.refused:
            self._found.update(news.refused)
        came = {r: self._came(r) for r, report in news.reports.items() if report.cause is None}
        for request_id in news.reports:
            self.gone(request_id)
        faults = {r: fault for r, fault in came.items() if fault is not None} | news.faults
        found = {r: self._refined(fault) for r, fault in faults.items()}
        for request_id, fault in found.items():
            self._end_one(scheduler, request_id, fault)
        if orders is None:
            return
        seen = {
            r: self._refined(explained(self.ledger, r, sighting, self._sizes[sighting.group]))
            for r, sighting in news.verdict.read().items()
            if isinstance(self.ledger, GenerationLedger)
        }
        since = {n: plan for n, plan in self._under_way.items() if n >= orders.number}
        self._end(scheduler, seen | {r: f for r, f in found.items() if r in orders.plan}, since)

    def _end_one(self, scheduler: "Scheduler", request_id: str, fault: PageFault) -> None:
        # One that was flagged is flagged again in the step that was under way by then.
        if request_id not in self._ending and _alive(scheduler, request_id):
            self._found[fault.cause] += 1
            self._flag(scheduler, request_id, fault)

    def _end(self, scheduler: "Scheduler", found: Mapping[str, PageFault], steps: Steps) -> None:
        """Flag these, and those who read what they were to write.

        Whether they were flagged before, or have gone, changes nothing for those who read.

        Args:
            steps: the one in which they were flagged, and those that are under way since.
        """
        known: set[str] = set()
        ending: Readers = {request_id: (fault, 0) for request_id, fault in found.items()}
        while ending:
            readers: Readers = {}
            for request_id, (fault, where) in ending.items():
                known.add(request_id)
                self._end_one(scheduler, request_id, fault)
                readers = self._misled(scheduler, request_id, fault, steps, where) | readers
            ending = {r: why for r, why in readers.items() if r not in known}

    def _misled(
        self, scheduler: "Scheduler", request_id: str, fault: PageFault, steps: Steps, where: int
    ) -> Readers:
        """Others who have, or had, pages that this request was to write, and did not.

        Args:
            where: the first token of its own that it misread.
        """
        manager, ledger = self._manager, self.ledger
        assert manager is not None
        assert isinstance(ledger, GenerationLedger)
        before = self._written.get(request_id, ALL)
        computed = self._written[request_id] = min(before, computed_before(request_id, steps, where))
        gone = self._recall(scheduler, request_id, fault)
        then = min(before, computed_before(request_id, steps, where, gone.last))
        pages = to_write(ledger, request_id, self._sizes, computed)
        pages |= was_to_write(ledger, request_id, self._sizes, then, gone)
        return who_read(ledger, manager.parted, request_id, self._sizes, pages)

    def _recall(self, scheduler: "Scheduler", request_id: str, fault: PageFault) -> GivenBack:
        """What the request gave back before its fault was known: no hash of what it wrote is left."""
        manager = self._manager
        assert manager is not None
        assert isinstance(self.ledger, GenerationLedger)
        gone: GivenBack = manager.parted.take(request_id)
        if gone.rows and not gone.told and not _alive(scheduler, request_id):
            self._found[fault.cause] += 1
            log.error("page integrity: of a request that has gone", extra=_told(request_id, fault))
        manager.block_pool.evict_blocks(was_to_write(self.ledger, request_id, self._sizes, 0, gone))
        return gone

    def ending(self, scheduler: "Scheduler") -> dict[str, PageFault]:
        """Requests that are to end with this step, and why."""
        return {r: f for r, f in self._ending.items() if _alive(scheduler, r)}

    def _came(self, request_id: str) -> PageFault | None:
        """The worker looked before it wrote; the pages may have changed hands since."""
        pages, tags = self._coming.get(request_id, ((), ()))
        for page, expected, found in zip(pages, tags, self.ledger.tags(pages), strict=True):
            if expected != found:
                return PageFault(IntegrityCause.STALE_TRANSFER, page, expected, found)
        return None

    def _refined(self, fault: PageFault) -> PageFault:
        """Tags tell of no owners: a page that nobody has was freed, not given to another."""
        assert isinstance(self.ledger, GenerationLedger)
        if fault.cause is IntegrityCause.REALLOCATED and not self.ledger.owners(fault.page):
            return PageFault(IntegrityCause.FREED, fault.page, fault.expected, fault.found)
        return fault

    def _flag(self, scheduler: "Scheduler", request_id: str, fault: PageFault) -> None:
        assert self._manager is not None
        if request_id in self._ending or not _alive(scheduler, request_id):
            return
        self._ending[request_id] = fault
        self._manager.condemned.add(request_id)
        log.error("page integrity: the request ends", extra=_told(request_id, fault))


def _leans(ledger: GenerationLedger, delta: LedgerDelta) -> dict[str, set[str]]:
    """Whose pages the requests of this step found. Writers of pages stay known while steps are under way, and
    who found a page found those before it, too: nobody leans on others through others alone."""
    leans: dict[str, set[str]] = {}
    for grown in delta.grown:
        found = [page for page, own in zip(grown.pages, grown.own, strict=True) if not own]
        writers = {writer for page in found if (writer := ledger.writer(page)) is not None}
        if others := writers - {grown.request_id}:
            leans.setdefault(grown.request_id, set()).update(others)
    return leans


def _told(request_id: str, fault: PageFault) -> dict[str, object]:
    return {
        "request_id": request_id,
        "cause": fault.cause,
        "page": fault.page,
        "expected": f"{fault.expected:#x}" if fault.expected != NO_TAG else "none",
        "found": f"{fault.found:#x}" if fault.found != NO_TAG else "none",
    }


def explained(ledger: GenerationLedger, request_id: str, sighting: Sighting, size: int) -> PageFault:
    row = ledger.row(request_id, sighting.group)
    given, tags = [page for page, _ in row], [tag for _, tag in row]
    return explain(sighting.finding, sighting.where, sighting.page, given, tags, size, ledger.tag_if_page)


def _alive(scheduler: "Scheduler", request_id: str) -> bool:
    request = scheduler.requests.get(request_id)
    return request is not None and not request.is_finished()


def _plan(output: "SchedulerOutput") -> dict[str, tuple[int, int]]:
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
    return {r: (computed[r], count) for r, count in output.num_scheduled_tokens.items()}


_BY_REQUEST = ("req_ids", "new_token_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens")
"""Lists of vLLM's `CachedRequestData` with one entry a request."""


def _expel(scheduler: "Scheduler", output: "SchedulerOutput", flagged: Any) -> None:
    """Take requests out of a step that was scheduled and not sent."""
    out = flagged & output.num_scheduled_tokens.keys()
    for request_id in out:
        output.total_num_scheduled_tokens -= output.num_scheduled_tokens.pop(request_id)
        output.scheduled_spec_decode_tokens.pop(request_id, None)
        output.scheduled_encoder_inputs.pop(request_id, None)
        scheduler.prev_step_scheduled_req_ids.discard(request_id)
    output.scheduled_new_reqs = [new for new in output.scheduled_new_reqs if new.req_id not in out]
    cached = output.scheduled_cached_reqs
    keep = [i for i, request_id in enumerate(cached.req_ids) if request_id not in out]
    for name in _BY_REQUEST:
        values = getattr(cached, name)
        if values:
            setattr(cached, name, [values[i] for i in keep])
    cached.resumed_req_ids -= out
    for request_id in out:
        cached.all_token_ids.pop(request_id, None)


def orders_of(output: "SchedulerOutput") -> CheckOrders | None:
    """The check's part in what was sent with a step."""
    metadata = output.kv_connector_metadata
    return metadata.check if isinstance(metadata, StepOrders) else None
