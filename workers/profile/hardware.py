"""What formats ask of a machine."""

from collections.abc import Iterator, Mapping
from typing import Final

from kv_transfer.api import BYTE_WIDE, WireFormat
from workers.api import Phase
from workers.profile.schema import GpuName, ModelProfile, PhaseProfile, WeightFormat
from workers.profile.vllm_args import Device

_CACHE_ON_CPU = dict.fromkeys(BYTE_WIDE, "avx512f")
"""By cache format: the processor's feature, as Linux names it, without which vLLM's kernels refuse it."""

Capability = tuple[int, int]
"""CUDA's compute capability, major and minor."""

GPU_CAPABILITY: Final[Mapping[GpuName, Capability]] = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}
"""NVIDIA's table of CUDA GPUs."""

_WEIGHTS_ON_GPU: Final[Mapping[WeightFormat, tuple[Capability, str]]] = {
    "bf16": ((8, 0), "weight_format native with dtype float16"),
    # `CompressedTensorsW8A8Fp8.get_min_capability`: 89. vLLM loads FP8 from 7.5 on and unpacks it for every
    # multiplication (`Fp8Config.get_min_capability`: 75): nothing that a prefill engine should do in silence.
    "fp8": ((8, 9), "weight_format int4"),
    # `CompressedTensorsWNA16.get_min_capability`: 75, and as much in vllm's `check_marlin_supported`.
    "int4": ((7, 5), "weight_format native with dtype float16"),
    # FP4 arithmetic begins with Blackwell; below vLLM unpacks it (`CompressedTensorsW4A4Fp4`: 75).
    "nvfp4": ((10, 0), "weight_format int4"),
}
"""The least that computes in the format, from vLLM 0.32's source, and the nearest that works on less."""

_SPARSE_NEEDS: Final[Capability] = (9, 0)
"""`supports_compute_capability` of every sparse backend in vllm/v1/attention/backends/mla: 9, 10 or 12."""


def shortcomings(profile: ModelProfile, device: Device, features: frozenset[str]) -> Iterator[str]:
    """Why engines of this profile would not start on this machine; one sentence each, with what would.

    Args:
        features: of the processor, as Linux names them.
    """
    if device != "cpu" or profile.engine == "scripted":
        return
    for key, served, phase in profile.pools():
        yield from _on_cpu(key, served.phase(phase), features)
    for parser in ("tool_parser", "reasoning_parser"):
        if getattr(profile, parser) is not None:
            yield f"{parser}: answers are not parsed yet; the nearest that works is a profile without it"


def processor_lacks(profile: ModelProfile, device: Device, features: frozenset[str]) -> Iterator[str]:
    """What of this profile's engines asks for another processor; one clause each. Part of `shortcomings`."""
    if device != "cpu" or profile.engine == "scripted":
        return
    for key, served, phase in profile.pools():
        if (lack := _cache_lack(key, served.phase(phase), features)) is not None:
            yield lack


def _cache_lack(key: str, part: PhaseProfile, features: frozenset[str]) -> str | None:
    needed = _CACHE_ON_CPU.get(part.format)
    if part.gpu is not None or needed is None or needed in features:
        return None
    return (
        f"{key}.kv_format: a cache in {part.format} needs a processor with {needed.upper()}, and this one "
        "has none"
    )


def _on_cpu(key: str, part: PhaseProfile, features: frozenset[str]) -> Iterator[str]:
    if part.gpu is not None:
        yield (
            f"{key}.gpu: {part.tensor_parallel} x {part.gpu.upper()} needed, and engines run on the CPU "
            "here; the nearest that works is a profile without gpu, tensor_parallel and memory_fraction "
            "(`phasegate preflight --dry-run` checks this one)"
        )
    if part.weight_format in ("fp8", "nvfp4"):
        yield (
            f"{key}.weight_format: weights in {part.weight_format} need a GPU; the nearest that works here "
            "is int4 or bf16"
        )
    if (lack := _cache_lack(key, part, features)) is not None:
        yield f"{lack}; the nearest that works here is kv_format bf16 with dtype bfloat16"


def gpu_shortcomings(profile: ModelProfile, phase: Phase, capability: Capability) -> Iterator[str]:
    """Why an engine of this phase would not start on such a GPU, as `shortcomings` tells it."""
    part, have = profile.phase(phase), _dotted(capability)
    needed, nearest = _WEIGHTS_ON_GPU.get(part.weight_format, ((0, 0), ""))
    if capability < needed:
        yield (
            f"{phase}.weight_format: weights in {part.weight_format} need a GPU of compute capability "
            f"{_dotted(needed)}, and this one has {have}; the nearest that works here is {nearest}"
        )
    if profile.sparse and capability < _SPARSE_NEEDS:
        yield (
            f"geometry.indexer: sparse attention needs a GPU of compute capability {_dotted(_SPARSE_NEEDS)}, "
            f"and this one has {have}; the nearest that works here is a model with dense attention"
        )
    if (
        part.format is WireFormat.FP8_E5M2
        and profile.geometry is not None
        and profile.geometry.mla is not None
    ):
        # `supported_kv_cache_dtypes` of every backend in vllm/v1/attention/backends/mla.
        yield (
            f"{phase}.kv_format: no kernel reads a cache of MLA in fp8_e5m2; the nearest that works is "
            "fp8_e4m3"
        )


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))
