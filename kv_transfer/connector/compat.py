"""What we override and lean on in vLLM is what was tested: told by the hashes of its source, at start-up."""

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

TESTED_VERSION: Final = "0.32.0"
_MIXIN: Final = "worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"
TESTED: Final[Mapping[str, str]] = {
    "core.block_pool:BlockPool": "955b5845abc85657",
    "core.block_pool:BlockHashToBlockMap": "cc5fab5530d173cf",
    "core.kv_cache_utils:FreeKVCacheBlockQueue": "9849f2e9a6e41fba",
    "core.kv_cache_manager:KVCacheManager.allocate_slots": "d49c19bc93d88430",
    "core.kv_cache_manager:KVCacheManager.get_computed_blocks": "be9daa362e13ca7f",
    "core.kv_cache_manager:KVCacheManager.cache_blocks": "a73f298780829d3a",
    "core.kv_cache_manager:KVCacheManager.remove_skipped_blocks": "d95919810d73e9c4",
    "core.kv_cache_manager:KVCacheManager.free": "9bdcefe1cac4f04b",
    "core.kv_cache_manager:KVCacheManager.pop_blocks_for_free": "8573db7203b8b28e",
    "core.sched.scheduler:Scheduler.schedule": "b858cfaada3974fa",
    "core.sched.scheduler:Scheduler._build_kv_connector_meta": "6e79764c45d0220a",
    "core.sched.scheduler:Scheduler._update_after_schedule": "b740cc3185990117",
    "core.sched.scheduler:Scheduler.update_from_output": "3c9751a0424f8f2f",
    "core.sched.scheduler:Scheduler._handle_failed_recving": "046d97ef446a1b33",
    "core.sched.scheduler:Scheduler.finish_requests": "77866ce0b50a3438",
    "core.sched.scheduler:Scheduler._free_request_blocks": "8cb33e2b8649b14e",
    "core.sched.scheduler:Scheduler._drain_deferred_frees": "4a1d510f16c40ea2",
    "core.sched.output:CachedRequestData": "b0a215b040121b1a",
    f"{_MIXIN}._get_kv_connector_output": "ed1ee2f0ae4bce4f",
}
TESTED_ON_CUDA: Final[Mapping[str, str]] = {
    "worker.gpu.model_runner:GPUModelRunner.prepare_attn": "0a079aa32c2b38f5",
    "worker.gpu_worker:Worker._make_model_runner": "3d6601a9b9f755ec",
    "worker.gpu.block_table:BlockTables": "c3bb0fbc79b03d15",
    "worker.gpu.kv_connector:ActiveKVConnector": "f42a07a5d34c8cf9",
    "worker.gpu.input_batch:InputBatch": "2f50df7eeb5758b9",
}
"""`module:name` below `vllm.v1` -> first 16 digits of the SHA-256 of its source."""


class UntestedVllm(RuntimeError):
    """The installed vLLM differs where our page checks hook into it. The message names what differs."""


def require_tested(tested: Mapping[str, str] = TESTED) -> None:
    """Raises UntestedVllm."""
    differ = [name for name, digest in tested.items() if digest_of(name) != digest]
    if differ:
        raise UntestedVllm(
            f"vLLM differs from the tested {TESTED_VERSION} in {', '.join(differ)}: pages cannot be vouched "
            "for. Install the tested version, or serve without page checks: `integrity: off` in the profile"
        )


@cache
def digest_of(name: str) -> str:
    """Of the source as it is installed; empty when there is no such thing."""
    module, _, path = name.partition(":")
    try:
        thing: Any = importlib.import_module(f"vllm.v1.{module}")
        for part in path.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return ""
    source = textwrap.dedent(inspect.getsource(thing))
    return hashlib.sha256(source.encode()).hexdigest()[:16]
