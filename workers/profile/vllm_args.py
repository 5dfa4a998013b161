"""A phase profile in vLLM's words. The only file that knows the names of vLLM's options."""

import json
from collections.abc import Mapping
from typing import Any, Final, Literal

from kv_transfer.api import BYTE_WIDE
from workers.api import Phase
from workers.profile.schema import ModelProfile, PhaseProfile

Device = Literal["cpu", "cuda"]

KEEP_LOGGING: Final[Mapping[str, str]] = {"VLLM_CONFIGURE_LOGGING": "0"}
"""vLLM's logging set-up closes every handler of the process, Serve's too. A restarted Serve controller asks
each replica for that handler's file, and without it takes over none of them."""

KEPT_PRIMITIVES: Final = 128
"""Compiled multiplications that oneDNN keeps on CPU: one for each shape of a weight and number of tokens in
a step, 250 KiB apiece with SmolLM2. Its own bound of 1024 lets an engine grow for hours, with every new
length of a prompt. Every layer keeps the last 32 besides: decode, whose steps have few tokens, compiles
nothing twice."""

LARGE_BUFFER: Final = 4 << 20
"""Bytes from which a buffer has pages of its own, given back when it is freed. glibc raises its bound to the
largest buffer that was ever freed: an engine then keeps as much as its transfers ever held at one time."""

_GIB: Final = 1 << 30
_USUAL_BATCHED_TOKENS: Final = {Phase.PREFILL: 512, Phase.DECODE: 2048}


def engine_args(
    profile: ModelProfile,
    phase: Phase,
    model_dir: str,
    engine_id: str,
    connector: dict[str, Any],
    *,
    device: Device = "cpu",
) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`.

    Args:
        engine_id: 128 random bits in hex, fresh for every start.
        connector: the connector's own settings, passed through.
    """
    part = profile.phase(phase)
    return {
        "model": model_dir,
        "dtype": part.dtype,
        "max_model_len": profile.context_length,
        "kv_cache_dtype": _cache_type(profile, phase),
        "block_size": profile.block_size,
        "max_num_seqs": part.max_sequences,
        "tensor_parallel_size": part.tensor_parallel,
        # One process for scheduler and model; with more GPUs one for each.
        "distributed_executor_backend": "uni" if part.tensor_parallel == 1 else "mp",
        # Engines see token ids only, and the gateway names every stop token.
        "skip_tokenizer_init": True,
        "language_model_only": True,  # images are refused by name: a vision tower is not loaded
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",  # the default serialises with pickle
        "kv_events_config": None,  # events carry token ids and salts
        "disable_log_stats": True,
        "worker_extension_cls": "workers.engine.tether.Tether",
        **_worker(device),
        "kv_transfer_config": {
            "kv_connector": "PhasegateConnector",
            "kv_connector_module_path": "kv_transfer.connector.facade",
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(connector),
        },
        **_scheduling(device),
        **_batching(profile, phase, device),
        **_memory(part, device),
    }


def _cache_type(profile: ModelProfile, phase: Phase) -> str:
    wanted = profile.phase(phase).format
    if profile.sparse:
        # Sparse attention on Hopper takes FP8 under this name alone, and keeps it as `fp8_ds_mla`
        # (`supported_kv_cache_dtypes`, vllm/v1/attention/backends/mla/flashmla_sparse.py).
        # And GLM chooses FP8 by itself on Blackwell where it is told `auto`
        # (vllm/model_executor/models/config.py).
        return "fp8" if wanted in BYTE_WIDE else "bfloat16"
    return wanted.value if wanted in BYTE_WIDE else "auto"


def measuring_args(profile: ModelProfile, model_dir: str, *, device: Device = "cpu") -> dict[str, Any]:
    """Of an engine that computes prompts as prefill does, for nobody: see `workers/engine/ranges.py`."""
    given = engine_args(profile, Phase.PREFILL, model_dir, "", {}, device=device)
    for ours in ("kv_transfer_config", "worker_cls", "scheduler_cls"):
        del given[ours]
    return given | {
        "kv_cache_dtype": "auto",
        "enable_prefix_caching": False,  # what the cache has is not computed again, and not seen
        "worker_extension_cls": "workers.engine.ranges.RangeWatch",
    }


def _worker(device: Device) -> dict[str, Any]:
    of_device = {"cpu": "worker.PhasegateCPUWorker", "cuda": "worker_cuda.PhasegateGPUWorker"}
    return {"worker_cls": f"kv_transfer.connector.{of_device[device]}"}


def _scheduling(device: Device) -> dict[str, Any]:
    # vLLM picks its asynchronous scheduler by itself only where no class is named.
    ahead = device == "cuda"  # a CPU step has nothing to overlap with; vLLM refuses it there
    name = "PhasegateAsyncScheduler" if ahead else "PhasegateScheduler"
    return {"async_scheduling": ahead, "scheduler_cls": f"kv_transfer.connector.scheduler.{name}"}


def _batching(profile: ModelProfile, phase: Phase, device: Device) -> dict[str, Any]:
    batched = profile.phase(phase).max_batched_tokens or _USUAL_BATCHED_TOKENS[phase]
    if phase is Phase.DECODE and device == "cpu":
        # A seeded request whose prefill is chunked kills the CPU engine: after each chunk the runner rewinds
        # the request's generator (`gen.set_offset`, vllm/v1/worker/gpu_model_runner.py) and a CPU generator
        # has no offset. Decode prefills what the transfer did not bring, so there it happens in one piece.
        # Prefill engines never seed.
        return {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(batched, profile.context_length),
        }
    return {"enable_chunked_prefill": True, "max_num_batched_tokens": batched}


def _memory(part: PhaseProfile, device: Device) -> dict[str, Any]:
    if device == "cpu":
        return {"enforce_eager": True}  # compilation takes a minute and a half and gains little
    if part.cache_size_gib is None:
        return {"gpu_memory_utilization": part.memory_fraction}
    return {"kv_cache_memory_bytes": part.cache_size_gib * _GIB}


def engine_environment(profile: ModelProfile, phase: Phase, device: Device, host: str) -> dict[str, str]:
    """Variables that must stand before vLLM or torch is imported; the engine's process inherits them.

    Args:
        host: the address that engines bind; loopback in local mode.
    """
    part = profile.phase(phase)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **KEEP_LOGGING,
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": host,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if host == "127.0.0.1":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    if device == "cpu":
        environment |= {
            "OMP_NUM_THREADS": str(part.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(part.cache_size_gib),
            # The `uni` executor (one process for scheduler and model) is honoured on CPU only with this.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Binding by vLLM pins every engine of a machine to the same first cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(KEPT_PRIMITIVES),
            "MALLOC_MMAP_THRESHOLD_": str(LARGE_BUFFER),
        }
    return environment


def async_engine_args(arguments: dict[str, Any]) -> Any:
    """vLLM's `AsyncEngineArgs` from what `engine_args` gave."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    transfer = KVTransferConfig(**arguments["kv_transfer_config"])
    return AsyncEngineArgs(**(arguments | {"kv_transfer_config": transfer}))


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same as options of vLLM's own command line. What is None is vLLM's default and is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words += [f"--{option}"] if value else [f"--no-{option}"]
        elif isinstance(value, dict):
            words += [f"--{option}", json.dumps(value)]
        else:
            words += [f"--{option}", str(value)]
    return words
