"""Faults on purpose, as data. Off unless configured; refused outside `mode: dev`."""

import msgspec


class FaultConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    foreign_pages: bool = False
    """The sender ships pages of an earlier transfer instead of the request's own."""
    only_transfers: str = ""
    """Prefix of the transfer ids that are affected; empty: all."""
    holds: str | None = None
    """Folder of barriers: see `kv_transfer.testing.holds`."""
