"""Page faults that wait for their moment, as files: engines are shared by many tests, and may be processes.

`<folder>/<name>.json` is a `PageFaultOrder`. Once it is let loose the file becomes `<name>.landed`, and says
which page took the place of which.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kv_transfer.api.faults import PageFaultOrder


class Landed(msgspec.Struct, frozen=True, kw_only=True):
    victim: str
    """Request id."""
    other: str = ""
    """Likewise."""
    page: int = -1
    """That of the victim."""
    instead: int = -1
    """That of the other."""


class Armed:
    """The engine's side. A file that is no order raises: a fault that is never let loose proves nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def orders(self) -> dict[str, PageFaultOrder]:
        """By name, of the faults that have not been let loose."""
        return {path.stem: read_order(path) for path in sorted(self._folder.glob("*.json"))}

    def landed(self, name: str, what: Landed) -> None:
        waiting = self._folder / f"{name}.json"
        waiting.write_bytes(msgspec.json.encode(what))
        waiting.rename(waiting.with_suffix(".landed"))


def arm(folder: Path, name: str, order: PageFaultOrder) -> None:
    """The test's side. The file appears whole."""
    beginning = folder / f"{name}.part"
    beginning.write_bytes(msgspec.json.encode(order))
    beginning.rename(beginning.with_suffix(".json"))


def landed(folder: Path) -> dict[str, Landed]:
    """What was let loose, by name."""
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Landed) for path in _landed(folder)}


def disarm(folder: Path) -> None:
    """Forget all faults, also those that were let loose."""
    for path in [*folder.glob("*.json"), *_landed(folder)]:
        path.unlink()


def read_order(path: Path) -> PageFaultOrder:
    return msgspec.json.decode(path.read_bytes(), type=PageFaultOrder)


def _landed(folder: Path) -> Iterable[Path]:
    return sorted(folder.glob("*.landed"))
