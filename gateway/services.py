"""What the HTTP layer works with: built once per gateway, passed explicitly."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from gateway.config import GatewayConfig, ModelFacts
from gateway.dispatch import driver
from gateway.drain import Drain
from gateway.errors import RETRY_AFTER_S, OutOfCapacity
from gateway.prompt.render import Renderer
from gateway.telemetry import Telemetry
from gateway.tenants.model import Tenant
from kv_transfer.testing.holds import Holds, NoHolds


class KeyResolver(Protocol):
    async def resolve(self, key: str) -> Tenant | None:
        """Whose key this is, or None. Raises `StateUnavailable`."""


class Capacity:
    """Counts requests being answered; refuses beyond the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._empty = asyncio.Event()
        self._empty.set()
        self.in_flight = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Raises `OutOfCapacity` when all are taken."""
        if self.in_flight >= self._limit:
            raise OutOfCapacity(retry_after_s=RETRY_AFTER_S)
        self.in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if self.in_flight == 0:
                self._empty.set()

    async def empty(self) -> None:
        """Return when nothing is in flight."""
        await self._empty.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    facts: ModelFacts
    renderer: Renderer
    engines: driver.Services
    system_fingerprint: str
    """Short form of the contract of its engines, and of what its prompts are rendered with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    config: GatewayConfig
    keys: KeyResolver
    models: tuple[ServedModel, ...]
    capacity: Capacity
    wall_clock: Callable[[], float]
    """Unix seconds, for `created`."""
    drain: Drain = field(default_factory=Drain)
    holds: Holds = field(default_factory=NoHolds)
    """Barriers on purpose, for tests."""
    telemetry: Telemetry = field(default_factory=Telemetry)

    def model(self, name: str) -> ServedModel | None:
        """By id or alias."""
        for served in self.models:
            if name == served.facts.id or name in served.facts.aliases:
                return served
        return None
