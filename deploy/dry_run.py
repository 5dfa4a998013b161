"""A start without one: what vLLM would be told for each phase of a profile, and whether it takes that."""

import os
from collections.abc import Iterator
from typing import Final

from deploy.yaml_file import ConfigError
from workers.api import Phase
from workers.profile.hardware import GPU_CAPABILITY, gpu_shortcomings
from workers.profile.schema import ModelProfile
from workers.profile.vllm_args import KEEP_LOGGING, Device, command_line, engine_args

_ENGINE_ID: Final = "0" * 32
"""Of the many that a start makes afresh; sockets and keys are made then, too, and are not shown."""


def device_of(profile: ModelProfile, phase: Phase) -> Device:
    return "cpu" if profile.phase(phase).gpu is None else "cuda"


def words(profile: ModelProfile, phase: Phase) -> list[str]:
    """What vLLM would be told, as words of its command line."""
    weights, device = profile.weights_of(phase), device_of(profile, phase)
    connector = {"backend": "gloo" if device == "cpu" else "nccl", "integrity": profile.integrity}
    folder = weights.path or weights.embedded or ""
    return command_line(engine_args(profile, phase, folder, _ENGINE_ID, connector, device=device))


def report(profile: ModelProfile) -> Iterator[str]:
    """Lines for a person. Imports vLLM; loads no weights, needs no GPU, starts no engine.

    Raises:
        ConfigError: with everything that vLLM or the GPU that the profile names would refuse.
    """
    os.environ.update(KEEP_LOGGING)
    from workers.profile import vllm_check

    if profile.engine == "scripted":
        raise ConfigError(f"profile: {profile.name} has scripted engines: vLLM is told nothing")
    wrong: list[str] = []
    for name, served, phase in profile.pools():
        part, told = served.phase(phase), words(served, phase)
        where = "the CPU" if part.gpu is None else f"{part.tensor_parallel} x {part.gpu.upper()}"
        yield f"{name} on {where}:"
        yield from (f"  {line}" for line in vllm_check.shown(told))
        if part.gpu is not None:
            wrong += gpu_shortcomings(served, phase, GPU_CAPABILITY[part.gpu])
        if (refused := vllm_check.refusal(told)) is not None:
            wrong.append(f"{name}: vLLM {vllm_check.version()} refuses its arguments: {refused}")
    wrong += vllm_check.unknown_parsers(profile)
    if wrong:
        raise ConfigError(f"profile {profile.name} would not start:\n  " + "\n  ".join(wrong))
    yield from _notes(profile)
    yield f"vLLM {vllm_check.version()} takes these arguments; no weights were read, nothing was started"


def _notes(profile: ModelProfile) -> Iterator[str]:
    """What vLLM would take and this system has not done yet."""
    if profile.sparse:
        yield "note: its indexer's cache cannot be shipped yet: its engines would refuse to start"
    if any(profile.phase(phase).tensor_parallel > 1 for phase in Phase):
        yield "note: handing pages over between engines of several GPUs each is not tested yet"
