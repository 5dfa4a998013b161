"""Tells the ledger of every change that vLLM makes to its pages. Nothing of vLLM is patched.

    pool.free_block_queue               -> WatchedQueue   pages that become free, and that leave the queue
    pool.metrics_collector              -> Collector      allocations, references, resets
    pool.cached_block_hash_to_block     -> WatchedHashes  hashes made, dropped, and looked up
    cache manager's class               -> WatchedCacheManager   whom all of that is done for; tables

`free_blocks` calls no collector, so the queue tells of frees. A reference that is given back while others
remain is told by nobody; it shows when the last one goes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.parted import Parted
from kv_transfer.integrity.tags import domain_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class UnwatchablePool(RuntimeError):
    """The pool is in use already, or not the kind that the hooks know."""


def watch(manager: KVCacheManager) -> GenerationLedger:
    """A ledger of this manager's pool, told of everything from now on.

    Raises:
        UnwatchablePool: pages are in use already: their owners would never be known.
    """
    pool = manager.block_pool
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if len(free) != pool.num_gpu_blocks - 1 or len(pool.cached_block_hash_to_block):
        raise UnwatchablePool(f"{pool.num_gpu_blocks - 1 - len(free)} pages are in use before the first step")
    ledger = GenerationLedger(
        pool.num_gpu_blocks,
        manager.num_kv_cache_groups,
        free=free,
        null_page=pool.null_block.block_id,
    )
    install(manager, ledger)
    return ledger


def install(manager: KVCacheManager, ledger: GenerationLedger) -> None:
    """Tell a ledger, which knows the pool's present state, of everything from now on."""
    pool = manager.block_pool
    pool.free_block_queue = WatchedQueue(pool.free_block_queue, ledger)
    pool.metrics_collector = Collector(pool, ledger)
    pool.cached_block_hash_to_block = WatchedHashes(pool.cached_block_hash_to_block, ledger)
    manager.__class__ = WatchedCacheManager
    manager.ledger = ledger
    manager.condemned = set()
    manager.parted = Parted()


def uninstall(manager: "WatchedCacheManager") -> None:
    """The pool and its manager are vLLM's alone again, as they are now."""
    pool = manager.block_pool
    pool.free_block_queue.__class__ = FreeKVCacheBlockQueue
    pool.metrics_collector = pool.metrics_collector.inner
    pool.cached_block_hash_to_block.__class__ = BlockHashToBlockMap
    manager.__class__ = KVCacheManager
    for watched in (pool.free_block_queue, pool.cached_block_hash_to_block, manager):
        del watched.ledger


class WatchedQueue(FreeKVCacheBlockQueue):
    """Takes over the linked list of another queue. A page that must not be queued stays out of it."""

    def __init__(self, queue: FreeKVCacheBlockQueue, ledger: GenerationLedger) -> None:
        self.num_free_blocks = queue.num_free_blocks
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self.ledger = ledger

    def popleft(self) -> "KVCacheBlock":
        block = super().popleft()
        self.ledger.taken(block.block_id)
        return block

    def popleft_n(self, n: int) -> "list[KVCacheBlock]":
        blocks: list[KVCacheBlock] = super().popleft_n(n)
        for block in blocks:
            self.ledger.taken(block.block_id)
        return blocks

    def remove(self, block: "KVCacheBlock") -> None:
        super().remove(block)
        self.ledger.taken(block.block_id)

    def append(self, block: "KVCacheBlock") -> None:
        if self._admits(block):
            super().append(block)

    def append_n(self, blocks: "list[KVCacheBlock]") -> None:
        super().append_n([block for block in blocks if self._admits(block)])

    def prepend_n(self, blocks: "list[KVCacheBlock]") -> None:
        super().prepend_n([block for block in blocks if self._admits(block)])

    def _admits(self, block: "KVCacheBlock") -> bool:
        admitted = self.ledger.queued(block.block_id, block.ref_cnt)
        if not admitted:
            log.error(
                "a page was freed that is free already or in use: kept out of the queue",
                extra={"page": block.block_id, "references": block.ref_cnt},
            )
        return admitted


class Collector:
    """Stands in the place of vLLM's metrics collector, and passes on to it."""

    def __init__(self, pool: "BlockPool", ledger: GenerationLedger) -> None:
        self._pool, self._ledger = pool, ledger
        self.inner = pool.metrics_collector

    def on_block_allocated(self, block: "KVCacheBlock") -> None:
        self._ledger.allocated(block.block_id)
        if self.inner:
            self.inner.on_block_allocated(block)

    def on_block_accessed(self, block: "KVCacheBlock") -> None:
        if not block.is_null:
            self._ledger.touched(block.block_id)
        if self.inner:
            self.inner.on_block_accessed(block)

    def on_block_evicted(self, block: "KVCacheBlock") -> None:
        if self.inner:
            self.inner.on_block_evicted(block)

    def reset(self) -> None:
        """The pool has just put a map of its own in place."""
        self._ledger.forgot_hashes()
        self._pool.cached_block_hash_to_block = WatchedHashes(
            self._pool.cached_block_hash_to_block, self._ledger
        )
        if self.inner:
            self.inner.reset()

    def drain_events(self) -> list[Any]:
        return list(self.inner.drain_events()) if self.inner else []


class WatchedHashes(BlockHashToBlockMap):
    """A hash leads only to pages that still hold what was hashed, and only its own tenant."""

    def __init__(self, hashes: BlockHashToBlockMap, ledger: GenerationLedger) -> None:
        """Takes over another map."""
        self._cache = hashes._cache
        self.ledger = ledger

    def insert(self, key: "BlockHashWithGroupId", block: "KVCacheBlock") -> None:
        super().insert(key, block)
        self.ledger.bound(key, block.block_id)

    def pop(self, key: "BlockHashWithGroupId", block_id: int) -> "KVCacheBlock | None":
        self.ledger.unbound(key, block_id)
        return super().pop(key, block_id)

    def get_one_block(self, key: "BlockHashWithGroupId") -> "KVCacheBlock | None":
        while True:
            block = super().get_one_block(key)
            if block is None:
                return None
            refusal = self.ledger.hit_refusal(key, block.block_id)
            if refusal is None:
                return block
            log.error(
                "a prefix hit was refused",
                extra={"request_id": self.ledger.serving, "cause": refusal.cause, "page": refusal.page},
            )
            self.pop(key, block.block_id)  # the next page with the same hash may be right


class WatchedCacheManager(KVCacheManager):
    """vLLM's cache manager, that says whom it works for. An existing one is turned into this by `watch`."""

    ledger: GenerationLedger
    condemned: set[str]
    """Requests that were flagged: what they write must not be found by its hash any more."""
    parted: Parted
    """What requests gave back while steps of theirs may be under way."""

    def allocate_slots(self, request: "Request", *args: Any, **kwargs: Any) -> "KVCacheBlocks | None":
        self._serve(request)
        if request.request_id in self.condemned:
            kwargs["delay_cache_blocks"] = True
        try:
            blocks = super().allocate_slots(request, *args, **kwargs)
        finally:
            self.ledger.serve_nobody()
        # The window moves on also where there were too few pages in the end.
        self._follow(request.request_id, grown=blocks is not None)
        return blocks

    def get_computed_blocks(self, request: "Request") -> "tuple[KVCacheBlocks, int, int]":
        self._serve(request)
        try:
            hit: tuple[KVCacheBlocks, int, int] = super().get_computed_blocks(request)
        finally:
            self.ledger.serve_nobody()
        return hit

    def cache_blocks(self, request: "Request", num_computed_tokens: int) -> None:
        if request.request_id in self.condemned:
            return
        self._serve(request)
        try:
            super().cache_blocks(request, num_computed_tokens)
        finally:
            self.ledger.serve_nobody()

    def remove_skipped_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        super().remove_skipped_blocks(request_id, *args, **kwargs)
        self._follow(request_id, grown=False)

    def free(self, request: "Request") -> None:
        self._release(request.request_id)
        super().free(request)

    def pop_blocks_for_free(self, request: "Request") -> "list[KVCacheBlock]":
        self._release(request.request_id)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        return blocks

    def _serve(self, request: "Request") -> None:
        self.ledger.serve(request.request_id, domain_of(request.cache_salt or ""))

    def _tables(self, request_id: str) -> "list[list[KVCacheBlock]]":
        managers = self.coordinator.single_type_managers
        return [manager.req_to_blocks.get(request_id, []) for manager in managers]

    def _follow(self, request_id: str, *, grown: bool) -> None:
        """Compare the request's tables with its rows; tell of windows that moved on and, if asked, of growth.

        Leading null pages say how far a window has moved. A shared page goes without any other sign.
        """
        extents = self.ledger.extents(request_id)
        longer = False
        for group, manager in enumerate(self.coordinator.single_type_managers):
            table = manager.req_to_blocks.get(request_id, ())
            end, length = extents[group]
            if end < length and end < len(table) and table[end].is_null:
                while end < length and end < len(table) and table[end].is_null:
                    end += 1
                self.ledger.skip(request_id, group, end)
            if len(table) > length:
                longer = True
        if grown and longer:
            more = [
                [block.block_id for block in table[length:]]
                for table, (_, length) in zip(self._tables(request_id), extents, strict=True)
            ]
            self.ledger.grow(request_id, more)

    def _release(self, request_id: str) -> None:
        """A page that the request has lost is not given back a second time."""
        tables = self._tables(request_id)
        pages = [[block.block_id for block in table] for table in tables]
        blocks = self.block_pool.blocks
        lost = self.ledger.lost(request_id, pages, lambda page: int(blocks[page].ref_cnt))
        for group, index in lost:
            tables[group][index] = self.block_pool.null_block
        if lost:
            log.error(
                "a request ends without pages that it lost",
                extra={"request_id": request_id, "pages": [pages[group][index] for group, index in lost]},
            )
        written = [
            [page if self.ledger.author(page) == request_id else None for page in table] for table in pages
        ]
        told = request_id in self.condemned
        if told:
            self.condemned.discard(request_id)
            self.block_pool.evict_blocks({page for table in written for page in table if page is not None})
        misbound = {page for table in pages for page in table if self.ledger.misbound(page)}
        self.block_pool.evict_blocks(misbound)
        if any(tables):
            rows = [self.ledger.row(request_id, group) for group in range(len(tables))]
            self.parted.add(request_id, rows, written, told=told)
        self.ledger.drop(request_id)


def reconcile(ledger: GenerationLedger, scheduler: "Scheduler") -> None:
    """Check the ledger's invariants against this scheduler's pool; once a step, while it is put together."""
    blocks = scheduler.kv_cache_manager.block_pool.blocks

    def references(page: int) -> int:
        return int(blocks[page].ref_cnt)

    ledger.reconcile(references, _held_by(scheduler))


def keep_lost_pages(ledger: GenerationLedger, scheduler: "Scheduler") -> None:
    """Of pages that wait for a step to end before they are given back, those that were lost since are not."""
    claimed: Counter[int] = Counter()
    for _, blocks in scheduler.deferred_frees:
        lost = []
        for block in blocks:
            page = block.block_id
            if block.is_null or len(ledger.owners(page)) + claimed[page] < block.ref_cnt:
                claimed[page] += 1
            else:
                lost.append(block)
        for block in lost:
            blocks.remove(block)
        if lost:
            log.error(
                "pages were lost before they were given back", extra={"pages": [b.block_id for b in lost]}
            )


def _held_by(scheduler: "Scheduler") -> Callable[[], Mapping[int, int]]:
    """References that no request's table explains: of steps in flight, and of copies that have to run."""

    def held() -> Counter[int]:
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        kept: list[Iterable[Any]] = [blocks for _, blocks in scheduler.deferred_frees]
        kept += [pair for manager in managers for pair in manager._pending_cow_copies]
        return Counter(block.block_id for blocks in kept for block in blocks)

    return held
