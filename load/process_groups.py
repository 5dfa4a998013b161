"""Which part of the system a process belongs to, by its command line."""

from collections.abc import Mapping
from typing import Final

import psutil

from load.stacks import Watched

GROUPS: Final[tuple[tuple[str, str], ...]] = (
    ("ingress", "haproxy"),
    ("ingress", "HAProxyManager"),
    ("ingress", "ProxyActor"),
    ("serve controller", "ServeController"),
    ("redis", "redis-server"),
    ("ray", "raylet"),
    ("ray", "gcs_server"),
    ("ray", "ray::"),
    ("ray", "ray/_private"),
    ("ray", "ray/dashboard"),
)
"""(group, part of a command line), the first that fits."""
SUPERVISOR: Final = "supervisor"
OTHER: Final = "other"


def group(command_line: str) -> str:
    return next((name for name, part in GROUPS if part in command_line), OTHER)


def watch_tree(root: int, known: Mapping[int, str]) -> list[Watched]:
    """Every process below `root`, under its group's name.

    Args:
        known: names of replicas by pid: nobody could tell them apart by their command lines.
    """
    found = [Watched(SUPERVISOR, root)]
    for child in psutil.Process(root).children(recursive=True):
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        found.append(Watched(known.get(child.pid) or group(words), child.pid))
    return found
