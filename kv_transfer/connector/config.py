"""The connector's settings, out of vLLM's untyped `kv_connector_extra_config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kv_transfer.api.contract import Contract
from kv_transfer.api.faults import FaultConfig
from kv_transfer.api.membership import Membership


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine_id: str
    """128 random bits in hex, new at every engine start."""
    bind_host: str
    """Internal interface for control sockets and links."""
    backend: Literal["gloo", "nccl"]
    gauges_endpoint: str
    """ZeroMQ ipc endpoint on which this engine answers for its gauges."""
    membership_file: str
    """Private file with the system's membership key: a path, since engines print their configuration."""
    contract: Contract = Contract()
    """Of what this engine serves: pages go to and come from engines of the same one only."""
    log_file: str = ""
    """Where the engine's process writes the lines of this package; empty: to its standard error."""
    link_timeout_s: float = 30.0
    """Longest that one send or receive, or building a link, may take."""
    drain_s: float = 10.0
    """Longest that an aborted transfer may stay on the wire before its link is given up."""
    staging_bytes: int = 64 * 2**20
    """Most bytes that wait in the sender for the wire; gathering pauses above it."""
    receive_staging_bytes: int = 256 * 2**20
    """Most bytes of pages that are under way to this engine at once; more of them wait for room."""
    integrity: bool = True
    """Whether pages have tags, and every step's tables are checked against them."""
    scale_file: str = ""
    """Scales of this engine's cache; empty: those of the checkpoint, or 1."""
    scale_sha256: str = ""
    """Of that file when the engine was told of it."""
    rounded_writes: bool = False
    """On CPU: whether what the engine itself writes to an FP8 cache is rounded to the nearest."""
    faults: FaultConfig = FaultConfig()

    def __post_init__(self) -> None:
        if self.faults.page_faults is not None and self.backend != "gloo":
            raise ValueError("faults.page_faults: tables can be made to go wrong on CPU only")

    def membership(self) -> Membership:
        """Raises OSError when the file is missing, ValueError when it holds no key."""
        return Membership.read(Path(self.membership_file))

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> "ConnectorConfig":
        """Raises msgspec.ValidationError naming the field, also for unknown keys."""
        return msgspec.convert(dict(raw), cls)
