"""The check's part in a step of the worker: on the tensors that the kernels are about to get.

On CPU, `start_load_kv` runs before the forward and nothing has copied the tables by then. On CUDA they are
copied before it: see `device_check.py`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.connector.layout import UnsupportedCache
from kv_transfer.connector.metadata import CheckOrders
from kv_transfer.integrity.checker import CheckCounts, Checker
from kv_transfer.integrity.device import NO_VERDICTS, NOTHING_SEEN, DeviceChecker, Seen, Verdict, Verdicts
from kv_transfer.integrity.prestep import Copy, judge
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.tags import NO_TAG
from kv_transfer.integrity.verify import Tables

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger(__name__)


def shapes_of(cache: "KVCacheConfig") -> list[GroupShape]:
    """How each cache group is read.

    Raises:
        UnsupportedCache: a group is read in a way that is not checked; named.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    shapes = []
    for group in cache.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, SlidingWindowSpec):
            shapes.append(GroupShape(spec.block_size, spec.sliding_window))
        elif isinstance(spec, FullAttentionSpec):
            shapes.append(GroupShape(spec.block_size))
        else:
            raise UnsupportedCache(
                f"{type(spec).__name__}: pages of this kind are not checked; `integrity: off` in the profile "
                "serves the model without checks"
            )
    return shapes


class StepCheck:
    def __init__(
        self,
        cache: "KVCacheConfig",
        *,
        checked: bool,
        now: Callable[[], float] = time.monotonic,
        on_device: DeviceChecker | None = None,
    ) -> None:
        """
        Args:
            checked: whether this worker's tables can be checked; else its steps are counted.
            on_device: where the tables lie on a device.
        """
        self._now = now
        self._fresh = partial(Checker, cache.num_blocks, shapes_of(cache) if checked else [], now=now)
        self._checker = on_device or self._fresh()
        self._layers = [tuple(group.layer_names) for group in cache.kv_cache_groups]
        self._checked = checked
        self._runner: Any = None
        self._faults: dict[str, PageFault] = {}
        self._refused: list[IntegrityCause] = []

    def restart(self) -> None:
        """Forget all tables, on the host: a ledger that begins anew tells of all of them."""
        assert isinstance(self._checker, Checker)
        counts = self._checker.counts
        self._checker = self._fresh()
        self._checker.counts = counts

    @property
    def counts(self) -> CheckCounts:
        return self._checker.counts

    def bind_runner(self, runner: Any) -> None:
        """The model runner: it alone knows which row is whose.

        Raises:
            UnsupportedCache: its kernels divide pages further than the scheduler does.
        """
        if not self._checked:
            return
        self._require_sizes([table.block_size for table in runner.input_batch.block_table.block_tables])
        self._runner = runner

    def _require_sizes(self, sizes: Sequence[int]) -> None:
        for shape, size in zip(self._checker.shadow.shapes, sizes, strict=True):
            if size != shape.block_size:
                raise UnsupportedCache(
                    f"kernels read pages of {size} tokens, the scheduler gives pages of {shape.block_size}: "
                    "tables cannot be checked; `integrity: off` serves without checks"
                )

    def before_step(
        self, orders: CheckOrders, clear: Sequence[int], copies: Sequence[Copy]
    ) -> tuple[list[int], list[Copy]]:
        """What may be cleared and copied of that which is about to be. Applies the step's changes."""
        if self._checked:
            self._checker.apply(orders.delta)
        if not (clear or copies or orders.rights):
            return [], []
        tags = self._checker.shadow.tags
        judged = judge(
            clear, copies, orders.rights, lambda page: int(tags[page]) if 0 <= page < len(tags) else NO_TAG
        )
        self._faults |= judged.faults
        self._refused += judged.refused
        return judged.clear, judged.copies

    def tables(self, context: "ForwardContext") -> list[tuple[int, Tables]]:
        """(cache group, tables): what the kernels of this forward get, as arrays that share its memory."""
        metadata = context.attn_metadata
        if not isinstance(metadata, dict):
            return []
        return [
            (group, tables)
            for group, layers in enumerate(self._layers)
            for tables in _tables_of(layers, metadata, context.slot_mapping)
        ]

    def before_forward(self, orders: CheckOrders | None, context: "ForwardContext") -> set[str]:
        """Check, and contain what is wrong; returns the requests that must end."""
        metadata = context.attn_metadata
        if not metadata:
            return set(self._faults)
        if orders is None or self._runner is None or not isinstance(metadata, dict):
            self._checker.counts.unchecked += 1
            return set(self._faults)
        began = self._now()
        groups = self.tables(context)
        self.counts.seconds += self._now() - began
        batch = self._runner.input_batch
        assert isinstance(self._checker, Checker)
        # Who was found wrong before the forward computes nothing in it that others may read.
        self._faults |= self._checker.check(
            groups, batch.req_ids[: batch.num_reqs], orders.plan, wrong=self._faults.keys()
        )
        return set(self._faults)

    def lost(self, page_ids: Sequence[int], tags: Sequence[int]) -> PageFault | None:
        """The first of these pages that does not have its tag any more: it is not to be read, or written."""
        if not self._checked:
            return None
        known = self._checker.shadow.tags
        for page, tag in zip(page_ids, tags, strict=False):  # without a ledger no tags were told
            if known[page] != tag:
                return PageFault(IntegrityCause.STALE_TRANSFER, page, tag, int(known[page]))
        return None

    def verdict(self) -> Verdicts:
        """Of the steps that are under way, from a device that is not waited for."""
        return NO_VERDICTS

    def take_verdict(self) -> Verdict | Seen:
        """The same, when the step has been queued."""
        return NOTHING_SEEN

    def fault(self, request_id: str, fault: PageFault) -> None:
        """Found outside a forward."""
        self._faults[request_id] = fault

    def refuse(self, cause: IntegrityCause) -> None:
        """Something was not done, and nobody has to end for it."""
        self._refused.append(cause)

    def take(self) -> tuple[dict[str, PageFault], list[IntegrityCause]]:
        """Faults, and what was refused, since the last call."""
        faults, self._faults = self._faults, {}
        refused, self._refused = self._refused, []
        return faults, refused


def _tables_of(layers: Sequence[str], metadata: dict[str, Any], slot_mapping: Any) -> list[Tables]:
    """Every combination of tensors that some layer of the group uses, once."""
    # Layers of a group share these objects, nearly always: told apart by identity, which costs little.
    of_layers = {id(found): found for found in map(metadata.__getitem__, layers)}
    slots_of_layers = {id(found): found for found in map(slot_mapping.get, layers)}
    if len(of_layers) == len(slots_of_layers) == 1:
        pairs = list(zip(of_layers.values(), slots_of_layers.values(), strict=True))
    else:
        pairs = [(metadata[layer], slot_mapping.get(layer)) for layer in layers]
    found: dict[tuple[int, ...], Tables] = {}
    for of_layer, slots_of_layer in pairs:
        reads = (of_layer.block_table, of_layer.seq_lens, of_layer.query_start_loc)
        own = of_layer.slot_mapping
        for slots in (own,) if slots_of_layer is None or slots_of_layer is own else (own, slots_of_layer):
            key = tuple(tensor.data_ptr() for tensor in (*reads, slots))
            if key not in found:
                found[key] = Tables(*(tensor.numpy() for tensor in (*reads, slots)))
    return list(found.values())
