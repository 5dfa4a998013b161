"""The check's part in a step on CUDA: on the tables that the model runner has just written, before a backend
copies them. Only vLLM's second runner has such a place; steps of the first count as unchecked."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from kv_transfer.connector.layout import UnsupportedCache
from kv_transfer.connector.metadata import CheckOrders
from kv_transfer.connector.step_check import StepCheck, shapes_of
from kv_transfer.integrity.device import NOTHING_SEEN, DeviceChecker, Judge, Seen, Verdict, Verdicts
from kv_transfer.integrity.prestep import Copy
from kv_transfer.integrity.verify import Tables

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig


def refuse_unseen(config: "VllmConfig") -> None:
    """
    Raises:
        UnsupportedCache: something is switched on whose kernels read other tables than the checked ones.
    """
    parallel = config.parallel_config
    unseen = {
        "speculative decoding": config.speculative_config is not None,
        "context parallelism in decode": parallel.decode_context_parallel_size > 1,
        "context parallelism in prefill": parallel.prefill_context_parallel_size > 1,
    }
    for name, used in unseen.items():
        if used:
            raise UnsupportedCache(
                f"{name} reads tables that are not checked; `integrity: off` in the profile serves without"
            )


def tables_of(input_batch: Any, block_tables: Any, slot_mappings: Any) -> list[Tables]:
    """By cache group, what the kernels are about to read: views of vLLM's tensors.

    Args:
        input_batch: vLLM's `InputBatch`.
        block_tables, slot_mappings: as `GPUModelRunner.prepare_attn` returns them.
    """
    return [
        Tables(table, input_batch.seq_lens, input_batch.query_start_loc, slots)
        for table, slots in zip(block_tables, slot_mappings, strict=True)
    ]


_UNDER_WAY: Final = 3
"""Of older steps the scheduler has heard: who was wrong in them, or leant on such, is in no step any more."""


class DeviceCheck(StepCheck):
    def __init__(
        self,
        cache: "KVCacheConfig",
        device: torch.device,
        judge: Judge,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_device = DeviceChecker(cache.num_blocks, shapes_of(cache), device, now=now, judge=judge)
        super().__init__(cache, checked=True, now=now, on_device=self._on_device)
        self._orders: CheckOrders | None = None
        self._verdict: Verdict | Seen = NOTHING_SEEN
        self._recent: deque[Verdict] = deque(maxlen=_UNDER_WAY)

    def bind_runner(self, runner: Any) -> None:
        self._require_sizes(runner.block_tables.block_sizes)

    def before_step(
        self, orders: CheckOrders, clear: Sequence[int], copies: Sequence[Copy]
    ) -> tuple[list[int], list[Copy]]:
        self._orders = orders
        return super().before_step(orders, clear, copies)

    def check_tables(self, request_ids: Sequence[str], groups: Sequence[Tables]) -> None:
        """Queue the check of the step for which `before_step` was called last.

        Args:
            groups: by cache group; tensors.
        """
        orders, self._orders = self._orders, None
        if orders is not None and request_ids:
            verdict = self._on_device.check(list(enumerate(groups)), request_ids, orders.plan)
            self._verdict = verdict
            self._recent.append(verdict)

    def before_forward(self, orders: CheckOrders | None, context: "ForwardContext") -> set[str]:
        """The check was queued before; nothing is known yet of what is wrong."""
        if self._orders is not None and self._orders.plan:
            self.counts.unchecked += 1
            self._orders = None
        return set(self._faults)

    def verdict(self) -> Verdicts:
        return Verdicts(tuple(self._recent))

    def take_verdict(self) -> Verdict | Seen:
        verdict, self._verdict = self._verdict, NOTHING_SEEN
        return verdict
