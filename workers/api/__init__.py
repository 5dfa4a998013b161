"""What other packages may import from workers. Standard library and msgspec only."""

from workers.api.bus import BUS_VERSION, Frame, Gauges, IntegrityCounts, Item
from workers.api.faults import FaultKind, WorkerFault
from workers.api.requests import DecodeRequest, PrefillRequest, Sampling
from workers.api.stats import (
    DecodeResult,
    FinishReason,
    Phase,
    PrefillResult,
    RefetchResult,
    ReplicaInfo,
    ReplicaIntegrity,
    ReplicaStatus,
)

__all__ = [
    "BUS_VERSION",
    "DecodeRequest",
    "DecodeResult",
    "FaultKind",
    "FinishReason",
    "Frame",
    "Gauges",
    "IntegrityCounts",
    "Item",
    "Phase",
    "PrefillRequest",
    "PrefillResult",
    "RefetchResult",
    "ReplicaInfo",
    "ReplicaIntegrity",
    "ReplicaStatus",
    "Sampling",
    "WorkerFault",
]
