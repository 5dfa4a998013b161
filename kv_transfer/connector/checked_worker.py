"""What every worker of vLLM's gets from us: its scales; and the check is told its runner and of each step."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.worker.worker_base import WorkerBase

from kv_transfer.api.scales import read_scale_file
from kv_transfer.connector.config import ConnectorConfig
from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.connector.guard import orders_of
from kv_transfer.connector.layout import BYTE_FORMATS
from kv_transfer.connector.scaling import set_scales

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class CheckedWorker(WorkerBase):
    """Stands before a worker class of vLLM's."""

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        given = settings(self.vllm_config)
        if given.scale_file:
            file = read_scale_file(Path(given.scale_file), sha256=given.scale_sha256)
            layers = self.vllm_config.compilation_config.static_forward_context
            set_scales(layers, file, BYTE_FORMATS.get(str(self.cache_config.cache_dtype)))

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        connector().bind_runner(self.model_runner)
        return times

    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        prepare(scheduler_output)
        return super().execute_model(scheduler_output)


def settings(config: "VllmConfig") -> ConnectorConfig:
    """Ours, in vLLM's configuration: a worker loads its model before there is a connector."""
    return ConnectorConfig.parse(config.kv_transfer_config.kv_connector_extra_config)


def prepare(step: "SchedulerOutput") -> None:
    """Bring the check up to date, and leave in the step what it may clear and copy."""
    orders = orders_of(step)
    if orders is not None:
        clear, copies = connector().before_step(
            orders,
            step.new_block_ids_to_zero or (),
            [tuple(pair) for pair in step.kv_cache_block_copies or ()],
        )
        step.new_block_ids_to_zero = clear or None
        step.kv_cache_block_copies = [KVCacheBlockCopy(*pair) for pair in copies] or None


def connector() -> PhasegateConnector:
    connector = get_kv_transfer_group()
    assert isinstance(connector, PhasegateConnector)
    return connector
