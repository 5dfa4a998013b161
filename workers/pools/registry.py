"""Where engines find each other's control addresses: the replica registry.

An entry belongs to one engine start, whose id is never used again, so it never changes. An entry that a
killed replica left behind leads to addresses where nobody answers, and every wait on a peer has a deadline.
"""

import asyncio
from typing import Final, Protocol

import msgspec

_NAMESPACE: Final = b"phasegate.engines"
_CACHED: Final = 256


class PeerRegistry(Protocol):
    async def publish(self, engine_id: str, addresses: tuple[str, ...]) -> None: ...

    async def lookup(self, engine_id: str) -> tuple[str, ...] | None:
        """Control addresses by rank; None when there is no such engine."""

    async def withdraw(self, engine_id: str) -> None: ...


class RayRegistry:
    """In the key-value store of Ray's control service. Works in any process of the cluster."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, ...]] = {}
        self._decoder = msgspec.msgpack.Decoder(tuple[str, ...])

    async def publish(self, engine_id: str, addresses: tuple[str, ...]) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        value = msgspec.msgpack.encode(addresses)
        await asyncio.to_thread(_internal_kv_put, engine_id.encode(), value, namespace=_NAMESPACE)

    async def lookup(self, engine_id: str) -> tuple[str, ...] | None:
        from ray.experimental.internal_kv import _internal_kv_get

        known = self._known.get(engine_id)
        if known is not None:
            return known
        value = await asyncio.to_thread(_internal_kv_get, engine_id.encode(), namespace=_NAMESPACE)
        if value is None:
            return None
        addresses = self._decoder.decode(value)
        if len(self._known) >= _CACHED:
            self._known.clear()
        self._known[engine_id] = addresses
        return addresses

    async def withdraw(self, engine_id: str) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        self._known.pop(engine_id, None)
        await asyncio.to_thread(_internal_kv_del, engine_id.encode(), namespace=_NAMESPACE)
