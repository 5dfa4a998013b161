"""A ledger that comes and goes in a running engine, so that its cost is measured against nothing at all.

While it is off no hook is installed, no step asks anything, and no table is compared: as with `NullLedger` in
an engine that was started without integrity.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kv_transfer.connector.guard import Guard
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.integrity.base import NullLedger
from kv_transfer.integrity.hooks import install, uninstall
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.tags import domain_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class LedgerSwitch:
    """Between steps only. The first step after `on` tells the worker of all pages."""

    def __init__(self, scheduler: Any, guard: Guard, check: StepCheck) -> None:
        self._scheduler, self._guard, self._check = scheduler, guard, check

    def set(self, *, on: bool) -> None:
        manager = self._scheduler.kv_cache_manager
        if on == isinstance(self._guard.ledger, GenerationLedger):
            return
        if on:
            ledger = adopted(manager, self._scheduler.requests.values())
            install(manager, ledger)
            self._guard.use(ledger, manager)
            self._check.restart()
        else:
            uninstall(manager)
            self._guard.use(NullLedger(), manager)


def adopted(manager: "KVCacheManager", requests: "Iterable[Request]") -> GenerationLedger:
    """A ledger of the pool as it is, taken to be right.

    Content of pages that nobody has is forgotten: whose it was is not known.
    """
    pool = manager.block_pool
    null = pool.null_block.block_id
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    pool.evict_blocks(set(free))
    ledger = GenerationLedger(pool.num_gpu_blocks, manager.num_kv_cache_groups, free=free, null_page=null)
    for request in requests:
        tables = manager.get_block_ids(request.request_id)
        ledger.serve(request.request_id, domain_of(request.cache_salt or ""))
        for page in (page for table in tables for page in table if page != null):
            if ledger.owners(page):
                ledger.touched(page)
            else:
                ledger.allocated(page)
                first = pool.blocks[page].block_hash
                for key in (first, *pool.cached_block_hashes_by_block.get(page, ())) if first else ():
                    ledger.bound(key, page)
        ledger.grow(request.request_id, tables)
        ledger.serve_nobody()
    return ledger
