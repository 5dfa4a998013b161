import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest

from workers.api import Phase
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import Device, async_engine_args, engine_args, engine_environment

CONNECTOR = {"engine_id": "ab" * 16, "bind_host": "127.0.0.1"}


def a_profile(**changes: Any) -> ModelProfile:
    raw = {
        "name": "own",
        "model_id": "own/model",
        "weights": {"path": "/models/own"},
        "context_length": 4096,
    }
    return parse_profile(raw | changes, source="test")


def arguments(phase: Phase, device: Device = "cpu", **changes: Any) -> dict[str, Any]:
    return engine_args(a_profile(**changes), phase, "/models/own", "ab" * 16, CONNECTOR, device=device)


def test_prefill_computes_long_prompts_in_pieces() -> None:
    args = arguments(Phase.PREFILL)

    assert (args["enable_chunked_prefill"], args["max_num_batched_tokens"]) == (True, 512)


@pytest.mark.parametrize(("asked", "given_"), [(None, 4096), (100, 4096), (5000, 5000)])
def test_decode_on_a_cpu_never_splits_a_prompt(asked: int | None, given_: int) -> None:
    """A split prompt with a seed kills the CPU engine, so every prompt must fit one step."""
    args = arguments(Phase.DECODE, decode={"max_batched_tokens": asked})

    assert args["enable_chunked_prefill"] is False
    assert args["max_num_batched_tokens"] == given_


def test_on_a_gpu_decode_may_split_prompts_and_schedules_ahead() -> None:
    args = arguments(Phase.DECODE, "cuda", decode={"cache_gib": 3})

    assert args["enable_chunked_prefill"] is True
    assert args["async_scheduling"] is True
    assert args["scheduler_cls"].endswith("PhasegateAsyncScheduler")
    assert args["kv_cache_memory_bytes"] == 3 * 2**30


@pytest.mark.parametrize(
    ("decode", "name"),
    [({}, "auto"), ({"kv_format": "bf16"}, "auto"), ({"kv_format": "fp8_e4m3"}, "fp8_e4m3")],
)
def test_a_cache_of_bytes_is_asked_for_by_name_and_on_its_side_alone(
    decode: dict[str, Any], name: str
) -> None:
    assert arguments(Phase.DECODE, decode=decode)["kv_cache_dtype"] == name
    assert arguments(Phase.PREFILL, decode=decode)["kv_cache_dtype"] == "auto"


@pytest.mark.parametrize("phase", list(Phase))
def test_both_phases_run_the_connector_in_both_roles_and_survive_a_failed_transfer(phase: Phase) -> None:
    transfer = arguments(phase)["kv_transfer_config"]

    assert transfer["kv_role"] == "kv_both"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_connector_extra_config"] == CONNECTOR


def test_engines_never_hash_with_pickle_nor_publish_token_ids() -> None:
    args = arguments(Phase.DECODE)

    assert args["prefix_caching_hash_algo"] == "sha256_cbor"
    assert args["kv_events_config"] is None


def test_a_cpu_engine_gets_its_cache_and_threads_from_the_profile() -> None:
    profile = a_profile(decode={"cache_gib": 2, "threads": 3})
    environment = engine_environment(profile, Phase.DECODE, "cpu", "127.0.0.1")

    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert 40 <= int(environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024


def test_only_loopback_is_tied_to_the_loopback_interface() -> None:
    environment = engine_environment(a_profile(), Phase.DECODE, "cuda", "10.0.0.5")

    assert "GLOO_SOCKET_IFNAME" not in environment
    assert "OMP_NUM_THREADS" not in environment
    assert environment["VLLM_HOST_IP"] == "10.0.0.5"


@pytest.mark.vllm
@pytest.mark.timeout(120)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_knows_every_option(device: Device, tmp_path: Path) -> None:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = arguments(Phase.DECODE, device) | {"model": str(tmp_path)}

    assert set(args) <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert set(args["kv_transfer_config"]) <= {field.name for field in dataclasses.fields(KVTransferConfig)}
    assert async_engine_args(args).kv_transfer_config.kv_connector == "PhasegateConnector"


@pytest.mark.vllm
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_worker_is_one_of_vllms_that_checks_pages(device: Device) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    module, _, name = arguments(Phase.DECODE, device)["worker_cls"].rpartition(".")
    worker = getattr(importlib.import_module(module), name)

    assert issubclass(worker, {"cpu": CPUWorker, "cuda": Worker}[device])


def test_pages_are_checked_unless_the_profile_says_otherwise() -> None:
    assert a_profile().integrity
    assert not a_profile(integrity=False).integrity


def test_a_fraction_of_a_gpu_is_left_to_vllm_to_share_out() -> None:
    args = arguments(Phase.DECODE, "cuda", decode={"gpu": "h200", "memory_fraction": 0.85})

    assert args["gpu_memory_utilization"] == 0.85
    assert "kv_cache_memory_bytes" not in args
    assert "gpu_memory_utilization" not in arguments(Phase.PREFILL, "cuda")


@pytest.mark.parametrize(("gpus", "executor"), [(1, "uni"), (8, "mp")])
def test_an_engine_on_many_gpus_has_a_process_for_each(gpus: int, executor: str) -> None:
    args = arguments(Phase.DECODE, "cuda", decode={"gpu": "h200", "tensor_parallel": gpus})

    assert (args["tensor_parallel_size"], args["distributed_executor_backend"]) == (gpus, executor)


def test_a_sparse_model_is_told_its_cache_by_the_names_that_its_kernels_know() -> None:
    mla = {
        "num_attention_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 64,
        "v_head_dim": 8,
    }
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "vocab_size": 8, "mla": mla}
    sparse = sizes | {"indexer": {"index_n_heads": 1, "index_head_dim": 128, "index_topk": 4}}
    told = {
        name: [
            arguments(phase, "cuda", geometry=geometry, decode={"kv_format": "fp8_e4m3"})["kv_cache_dtype"]
            for phase in Phase
        ]
        for name, geometry in (("dense", sizes), ("sparse", sparse))
    }

    assert told == {"dense": ["auto", "fp8_e4m3"], "sparse": ["bfloat16", "fp8"]}
