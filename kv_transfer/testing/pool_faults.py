"""Faults in what vLLM's scheduler and its page pool hold: the scheduler's side, with or without a ledger."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def pages_of(scheduler: "Scheduler", request: "Request") -> list[int]:
    """In logical order; of the first cache group."""
    return list(scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])


def free_live(pool: "BlockPool", pages: Sequence[int]) -> None:
    """One reference too many is given back. Those without a hash are the next to be given out."""
    pool.free_blocks([pool.blocks[page] for page in pages])


def mislead_to(pool: "BlockPool", victim: "Request", page: int) -> None:
    """The hash of the victim's first page leads to a page that holds something else."""
    key = make_block_hash_with_group_id(victim.block_hashes[0], 0)
    pool.cached_block_hash_to_block._cache[key] = pool.blocks[page]


def hash_as(victim: "Request", other: "Request") -> None:
    """The victim's first page is hashed as the other's: as if salts, and tokens, were left out."""
    victim.block_hashes[0] = other.block_hashes[0]


def clear(output: "SchedulerOutput", page: int) -> None:
    output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), page]


def copy_over(output: "SchedulerOutput", source: int, target: int) -> None:
    copies = list(output.kv_cache_block_copies or ())
    output.kv_cache_block_copies = [*copies, KVCacheBlockCopy(source, target)]


class Allocations:
    """Between the scheduler and its pool: sees who gets new pages, and may give out others."""

    def __init__(self, scheduler: "Scheduler", instead: "Callable[[Request, KVCacheBlock], Any]") -> None:
        """
        Args:
            instead: asked with the request and the last of its new pages; returns a page to give out in its
                place, or None.
        """
        self._manager, self._instead = scheduler.kv_cache_manager, instead
        self._pool = self._manager.block_pool
        self._serving: Request | None = None
        self._manager.allocate_slots = self._allocate_slots
        self._pool.get_new_blocks = self._get_new_blocks

    def _allocate_slots(self, request: "Request", *args: Any, **kwargs: Any) -> Any:
        self._serving = request
        try:
            return type(self._manager).allocate_slots(self._manager, request, *args, **kwargs)
        finally:
            self._serving = None

    def _get_new_blocks(self, count: int) -> Any:
        blocks = type(self._pool).get_new_blocks(self._pool, count)
        if self._serving is not None and blocks:
            wrong = self._instead(self._serving, blocks[-1])
            if wrong is not None:
                unused, blocks[-1] = blocks[-1], wrong
                wrong.ref_cnt += 1
                self._pool.free_blocks([unused])
        return blocks
