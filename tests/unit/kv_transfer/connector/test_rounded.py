"""What an engine writes to an FP8 cache on CPU is rounded to the nearest, or it does not start.

vLLM's kernel for BF16 pages runs everywhere. Where a processor has no AVX-512 its kernel for FP8 pages does
not, and what it would do (cut off) is done here in torch, behind the real one for BF16.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from deploy.bootstrap import inspect_machine
from kv_transfer.api.page import WireFormat
from kv_transfer.connector import rounded
from kv_transfer.connector.rounded import (
    RoundedBackend,
    RoundedImpl,
    UnroundedWrites,
    every_number,
    on_grid,
    require_rounded,
    round_writes,
)
from kv_transfer.connector.worker import PhasegateCPUWorker

HEADS, SIZE, BLOCK = 3, 64, 32
FEATURES = inspect_machine(Path("/")).flags
TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def a_layer(kind: type, cache_dtype: str = "fp8_e4m3", *, k: float = 1.0, v: float = 1.0) -> Any:
    """As much of vLLM's layer as a write looks at."""
    impl = object.__new__(kind)
    impl.kv_cache_dtype, impl.attn_type = cache_dtype, AttentionType.DECODER
    impl.num_kv_heads, impl.head_size = HEADS, SIZE
    return SimpleNamespace(impl=impl, isa="vec", _k_scale_float=k, _v_scale_float=v)


def cut_off(numbers: torch.Tensor, target: torch.dtype) -> torch.Tensor:
    """Toward zero, as bytes. The bytes of positive numbers are ordered as the numbers are."""
    largest = torch.finfo(target).max
    nearest = numbers.float().clamp(-largest, largest).to(target)
    beyond = nearest.float().abs() > numbers.float().abs()
    return nearest.view(torch.uint8) - beyond.to(torch.uint8)


@pytest.fixture(params=[True, False], ids=["signed zeros", "zeros without a sign"])
def fp8_kernel(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where vLLM looks it up. With AVX-512 the kernel drops the sign of a zero, without BF16 instructions."""
    real = cpu_attn.ops.cpu_attn_reshape_and_cache

    def write(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
        isa: str,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if kv_cache_dtype == "auto":
            real(key, value, key_cache, value_cache, slots, isa)
            return
        pages, heads, size, width = key_cache.shape
        wide = torch.zeros((pages, heads, 2 * size, width), dtype=key.dtype).chunk(2, dim=2)
        real(key, value, *wide, slots, isa)
        for half, scale, cache in zip(wide, (k_scale, v_scale), (key_cache, value_cache), strict=True):
            codes = cut_off(half.float() / scale, TYPES[kv_cache_dtype])
            cache.copy_(codes if request.param else torch.where(codes == 0x80, 0, codes))

    monkeypatch.setattr(cpu_attn.ops, "cpu_attn_reshape_and_cache", write)


@pytest.mark.parametrize("scale", [1.0, 0.125, 0.3, 7.7])
@pytest.mark.parametrize("target", list(TYPES))
def test_every_number_is_rounded_as_the_reference_rounds(target: str, scale: float) -> None:
    numbers = every_number(HEADS, SIZE, BLOCK, torch.bfloat16)
    largest = torch.finfo(TYPES[target]).max
    reference = (numbers.float() / scale).clamp(-largest, largest).to(TYPES[target])

    found = on_grid(numbers, scale, WireFormat(target))

    assert found.dtype is torch.bfloat16
    assert torch.equal(found.float(), reference.float())
    assert torch.equal(cut_off(found, TYPES[target]), reference.view(torch.uint8))  # nothing is left to cut


def test_numbers_are_not_changed_where_they_came_from() -> None:
    numbers = torch.full((2, HEADS, SIZE), 1000.0)

    on_grid(numbers, 1.0, WireFormat.FP8_E4M3)

    assert numbers.eq(1000).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", list(TYPES))
@pytest.mark.usefixtures("fp8_kernel")
def test_a_kernel_that_cuts_off_gets_nothing_to_cut_off(target: str, dtype: torch.dtype) -> None:
    layers = {"one": a_layer(RoundedImpl, target, k=0.3, v=2.0), "two": a_layer(RoundedImpl, target)}

    require_rounded(layers, BLOCK, dtype)


@pytest.mark.usefixtures("fp8_kernel")
def test_an_engine_whose_backend_was_not_taken_does_not_start() -> None:
    """What a rounding that failed to load looks like: vLLM's own backend writes."""
    layers = {"one": a_layer(RoundedImpl), "two": a_layer(cpu_attn.CPUAttentionBackendImpl)}

    with pytest.raises(UnroundedWrites, match=r"two: \d+ numbers did not land .* by CPUAttentionBackendImpl"):
        require_rounded(layers, BLOCK, torch.bfloat16)


@pytest.mark.usefixtures("fp8_kernel")
def test_a_worker_tries_its_writes_before_it_is_ready(tmp_path: Path) -> None:
    told = {
        "engine_id": "e",
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": f"ipc://{tmp_path}/gauges",
        "membership_file": "",
        "rounded_writes": True,
    }
    worker = object.__new__(PhasegateCPUWorker)
    worker.vllm_config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=told),
        compilation_config=SimpleNamespace(
            static_forward_context={"one": a_layer(cpu_attn.CPUAttentionBackendImpl)}
        ),
    )
    worker.cache_config = SimpleNamespace(block_size=BLOCK)
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)

    with pytest.raises(UnroundedWrites, match="one"):
        worker.compile_or_warm_up_model()


@pytest.mark.usefixtures("fp8_kernel")
def test_a_write_that_forgets_the_scales_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded, "on_grid", lambda numbers, scale, target: on_grid(numbers, 1.0, target))

    with pytest.raises(UnroundedWrites, match="one"):
        require_rounded({"one": a_layer(RoundedImpl, k=0.5)}, BLOCK, torch.bfloat16)


@pytest.mark.usefixtures("fp8_kernel")
@pytest.mark.parametrize("wrong", [0x81, 0x01, 0x7E])
def test_only_the_sign_of_a_zero_is_forgiven(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """What else lands where a zero should, in one of 65,536 numbers, ends the start."""
    written = cut_off

    def once(numbers: torch.Tensor, target: torch.dtype) -> torch.Tensor:
        codes = written(numbers, target)
        codes.view(-1)[(numbers.view(-1) == 0).nonzero()[0]] = wrong
        return codes

    monkeypatch.setitem(globals(), "cut_off", once)

    with pytest.raises(UnroundedWrites, match=r"one: [12] numbers"):
        require_rounded({"one": a_layer(RoundedImpl)}, BLOCK, torch.bfloat16)


@pytest.mark.skipif("avx512f" not in FEATURES, reason="vLLM's kernel for FP8 pages needs AVX-512")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", list(TYPES))
def test_vllms_own_kernel_writes_rounded_numbers_as_they_are(target: str, dtype: torch.dtype) -> None:
    require_rounded({"one": a_layer(RoundedImpl, target, k=0.3, v=2.0)}, BLOCK, dtype)
    with pytest.raises(UnroundedWrites, match="by CPUAttentionBackendImpl"):
        require_rounded({"one": a_layer(cpu_attn.CPUAttentionBackendImpl, target)}, BLOCK, dtype)


def test_a_cache_that_is_not_narrow_is_written_as_vllm_writes_it_and_has_nothing_to_vouch_for() -> None:
    layer = a_layer(RoundedImpl, "auto")
    key = torch.randn(BLOCK, HEADS, SIZE, dtype=torch.bfloat16)
    slots = torch.arange(BLOCK)
    caches = []
    for kind in (RoundedImpl, cpu_attn.CPUAttentionBackendImpl):
        caches.append(torch.zeros(1, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16))
        a_layer(kind, "auto").impl.do_kv_cache_update(layer, key, key, caches[-1], slots)

    assert caches[0].any()
    assert torch.equal(*caches)
    with pytest.raises(UnroundedWrites, match="no FP8 cache"):
        require_rounded({"one": layer}, BLOCK, torch.bfloat16)


def test_vllm_takes_the_backend_by_its_own_name() -> None:
    assert RoundedBackend.get_name() == AttentionBackendEnum.CPU_ATTN.name
    round_writes()
    try:
        assert AttentionBackendEnum.CPU_ATTN.get_class().get_impl_cls() is RoundedImpl
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
