"""What formats ask of a machine."""

from collections.abc import Iterator

from kv_transfer.api import BYTE_WIDE
from workers.api import Phase
from workers.profile.schema import ModelProfile
from workers.profile.vllm_args import Device

_CACHE_ON_CPU = dict.fromkeys(BYTE_WIDE, "avx512f")
"""By cache format: the processor's feature, as Linux names it, without which vLLM's kernels refuse it."""


def shortcomings(profile: ModelProfile, device: Device, features: frozenset[str]) -> Iterator[str]:
    """Why an engine of this profile would not start here; one sentence each, with what would.

    Args:
        features: of the processor, as Linux names them.
    """
    if device != "cpu" or profile.engine == "scripted":
        return
    for phase in Phase:
        wanted = profile.phase(phase).format
        needed = _CACHE_ON_CPU.get(wanted)
        if needed is not None and needed not in features:
            yield (
                f"{phase}.kv_format: a cache in {wanted} needs a processor with {needed.upper()}, and this "
                "one has none; the nearest that works here is kv_format bf16 with dtype bfloat16"
            )
