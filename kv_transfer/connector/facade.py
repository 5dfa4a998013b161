"""What vLLM loads: one class for both halves. It only forwards."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kv_transfer.api.handoff import HandoffReport
from kv_transfer.api.log_fields import PrivateLog
from kv_transfer.api.page import Scales
from kv_transfer.connector.compat import TESTED_ON_CUDA, require_tested
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.device_check import DeviceCheck, refuse_unseen
from kv_transfer.connector.guard import Guard
from kv_transfer.connector.layout import UnsupportedCache, isa_of
from kv_transfer.connector.metadata import CheckOrders, StepOrders, WorkerAddress
from kv_transfer.connector.scheduler_side import SchedulerSide
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.connector.worker_side import WorkerSide
from kv_transfer.integrity.prestep import Copy
from kv_transfer.integrity.verify import Tables
from kv_transfer.testing.step_faults import StepFaults

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class PhasegateConnector(KVConnectorBase_V1, SupportsHMA):
    """Ships prompt pages from a prefill engine to a decode engine."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = ConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        _log_to(config.log_file)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedCache(
                f"the model has {len(kv_cache_config.kv_cache_groups)} cache groups (hybrid attention): "
                "only models with one can be split into prefill and decode"
            )
        self._layers = vllm_config.compilation_config.static_forward_context
        self._cache_dtype = str(vllm_config.cache_config.cache_dtype)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._idle = False
        if role is KVConnectorRole.SCHEDULER:
            tables = tables_checked(config, vllm_config) is not None
            self._scheduler = SchedulerSide(config, vllm_config.cache_config.block_size, tables=tables)
        else:
            check = _step_check(config, vllm_config, kv_cache_config)
            self._worker = WorkerSide(config, vllm_config.parallel_config.rank, check)
        if config.integrity:
            require_tested()

    @property
    def _s(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _w(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()

    # -- scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        self._s.bind_pool(gpu_block_pool)

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._s.bind_manager(kv_cache_manager)

    @property
    def guard(self) -> Guard:
        return self._s.guard

    @property
    def step_faults(self) -> StepFaults:
        return self._s.step_faults

    def bind_counts(self, counts: Callable[[], tuple[int, int, int]]) -> None:
        self._s.bind_counts(counts)

    def report_of(self, request_id: str) -> HandoffReport | None:
        return self._s.report_of(request_id)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._s.bind_workers({r: a for r, a in metadata.items() if isinstance(a, WorkerAddress)})

    def on_new_request(self, request: "Request") -> None:
        self._s.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        return self._s.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._s.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._s.build_orders(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._s.on_news(connector_output.kv_connector_worker_meta)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._s.finished(request)

    # -- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layers = [self._layers.get(name) for name in kv_caches]
        self._w.register(
            kv_caches,
            isa=isa_of(layers),
            cache_dtype=self._cache_dtype,
            scales=scales_of(layers),
        )

    @property
    def step_check(self) -> StepCheck:
        return self._w.check

    def bind_runner(self, runner: Any) -> None:
        self._w.bind_runner(runner)

    def before_step(
        self, orders: CheckOrders, clear: Sequence[int], copies: Sequence[Copy]
    ) -> tuple[list[int], list[Copy]]:
        return self._w.check.before_step(orders, clear, copies)

    def check_tables(self, request_ids: Sequence[str], groups: Sequence[Tables]) -> None:
        """From the model runner, on CUDA; see `device_check.py`."""
        if isinstance(self._w.check, DeviceCheck):
            self._w.check.check_tables(request_ids, groups)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._w.address()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        # vLLM's second runner calls before the forward's context is set, and says it by the step's tokens.
        self._idle = forward_context.attn_metadata is None and not kwargs.get("num_tokens")
        self._w.begin_step(self._orders())
        self._w.check_step(self._orders(), forward_context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Pages are complete before a request is scheduled: nothing to wait for."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Pages are gathered when the step is over."""

    def wait_for_save(self) -> None:
        self._w.after_forward(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = self._w.finish_step(idle=self._idle)
        return KVConnectorTransferResults(
            finished_sending=finished.sending,
            finished_recving=finished.receiving,
            failed_recving=finished.failed,
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._w.take_news()

    def take_events(self) -> Iterable[Any]:
        return ()

    def _orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        return metadata


def scales_of(layers: Iterable[object]) -> Scales:
    """With which the kernels of these layers read the cache; final when caches are registered."""
    found = tuple(
        (float(getattr(layer, "_k_scale_float", 1.0)), float(getattr(layer, "_v_scale_float", 1.0)))
        for layer in layers
    )
    return () if set(found) <= {(1.0, 1.0)} else found


def tables_checked(config: ConnectorConfig, vllm_config: "VllmConfig") -> Literal["host", "device"] | None:
    """Where each step's tables are checked."""
    if not config.integrity:
        return None
    if config.backend == "gloo":
        return "host"
    return "device" if vllm_config.use_v2_model_runner else None


def _step_check(config: ConnectorConfig, vllm_config: "VllmConfig", cache: "KVCacheConfig") -> StepCheck:
    place = tables_checked(config, vllm_config)
    if place != "device":
        return StepCheck(cache, checked=place is not None)
    from kv_transfer.integrity.verify_triton import check_triton

    refuse_unseen(vllm_config)
    require_tested(TESTED_ON_CUDA)
    return DeviceCheck(cache, torch.device("cuda", torch.cuda.current_device()), check_triton)


def _log_to(path: str) -> None:
    """Once for each process: both halves may live in one."""
    logger = logging.getLogger("kv_transfer")
    if path and not any(isinstance(handler, PrivateLog) for handler in logger.handlers):
        logger.addHandler(PrivateLog(Path(path)))
        logger.setLevel(logging.INFO)
