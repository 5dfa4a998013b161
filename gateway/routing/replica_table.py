"""Replicas of each deployment as this process's routers see them.

Serve pickles a router's module by value: its globals are private copies. This module is imported by
reference, on both sides, so that the gateway reads what its routers wrote. Routers may run on another
thread; a whole entry is replaced at once, which needs no lock.
"""

from typing import Final


class ReplicaGone(LookupError):
    """The replica that a call was pinned to is not there any more."""


class ReplicaFull(Exception):
    """The replica that a call was pinned to has taken no call for a while."""


_REPLICAS: Final[dict[tuple[str, str], tuple[str, ...]]] = {}


def publish(app: str, deployment: str, replica_ids: tuple[str, ...]) -> None:
    _REPLICAS[app, deployment] = replica_ids


def replicas(app: str, deployment: str) -> tuple[str, ...]:
    """Ids, sorted. Empty until the deployment's router has heard from the controller."""
    return _REPLICAS.get((app, deployment), ())
