"""What a replica is told when it starts. Primitives only: it crosses processes in Serve's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from workers.bus.publisher import DropFrame, drop_nth
from workers.profile.schema import ModelProfile, parse_profile
from workers.profile.vllm_args import Device

_FAULTS: Final = {"drop_bus_frame", "foreign_pages", "holds", "page_faults"}


class ReplicaConfigError(ValueError):
    """The configuration cannot be used; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    profile: Mapping[str, Any]
    """A model profile as `dump_profile` gives it."""
    model_dir: str
    """Folder with safetensors and tokenizer."""
    host: str = "127.0.0.1"
    """Address of the internal interface."""
    device: Device = "cpu"
    logs: str = ""
    """Folder for the log of the engine's own process; empty: it has none."""
    mode: Literal["dev", "production"] = "production"
    testing: Mapping[str, int | str] = field(default_factory=dict)
    """Faults on purpose, in mode `dev` only.

    `drop_bus_frame: N` loses the N-th frame with tokens. `foreign_pages: true` ships pages
    of another request. `holds: FOLDER` watches barriers there: see `kv_transfer.testing.holds`.
    `page_faults: FOLDER` watches faults of pages there: see `kv_transfer.testing.armed`.
    """

    shutdown_grace_s: float = 10.0
    """How long requests inside may go on when the replica is told to stop."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.testing) - _FAULTS)
        if unknown:
            raise ReplicaConfigError(f"testing.{unknown[0]}: no such fault")
        if self.testing and self.mode != "dev":
            raise ReplicaConfigError("testing: faults on purpose are refused unless mode is dev")
        if int(self.testing.get("drop_bus_frame", 1)) < 1:
            raise ReplicaConfigError("testing.drop_bus_frame: counted from 1")
        if self.mode != "dev" and self.profile.get("engine") == "scripted":
            raise ReplicaConfigError("profile.engine: scripted is refused unless mode is dev")
        if self.mode != "dev" and self.profile.get("integrity") is False:
            raise ReplicaConfigError("profile.integrity: off is refused unless mode is dev")

    def model_profile(self) -> ModelProfile:
        return parse_profile(self.profile, source="replica configuration: profile")

    def connector_faults(self) -> dict[str, bool | str]:
        faults: dict[str, bool | str] = {}
        if self.testing.get("foreign_pages"):
            faults["foreign_pages"] = True
        if (folder := self.holds()) is not None:
            faults["holds"] = folder
        if (armed := self.testing.get("page_faults")) is not None:
            faults["page_faults"] = str(armed)
        return faults

    def holds(self) -> str | None:
        folder = self.testing.get("holds")
        return None if folder is None else str(folder)

    def drop(self) -> DropFrame | None:
        n = self.testing.get("drop_bus_frame")
        return None if n is None else drop_nth(int(n))
