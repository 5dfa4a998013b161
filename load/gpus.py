"""GPUs that a plan can be made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    memory_gib: float
    """What CUDA gives to a process, which is less than the name says."""
    bandwidth_gb_s: float
    """Of its memory, in 10**9 bytes a second."""


GPUS: Final[Mapping[str, Gpu]] = {
    # Memory: the least of 79.10 to 79.18 GiB that torch's out-of-memory messages name as "total capacity".
    # Bandwidth: NVIDIA H100 data sheet, SXM: 3.35 TB/s.
    "h100": Gpu(memory_gib=79.1, bandwidth_gb_s=3350),
    # Memory: torch's out-of-memory messages: "total capacity of 139.80 GiB".
    # Bandwidth: NVIDIA H200 data sheet, SXM: 4.8 TB/s.
    "h200": Gpu(memory_gib=139.8, bandwidth_gb_s=4800),
    # Both as queried from the device in pytorch/ao pull request 4002: 178.35 GiB; 7,680 bits at 3,996 MHz.
    "b200": Gpu(memory_gib=178.35, bandwidth_gb_s=7672),
}
