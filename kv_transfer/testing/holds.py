"""Barriers that keep a request in a stage, for tests of what happens when it ends there.

While the file `<folder>/<stage>` exists, whoever passes the stage leaves `<folder>/<stage>.reached/<id>` and
waits until the file is gone. Files, because the stages lie in several processes.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

LOOK_EVERY_S: Final = 0.02
LONGEST_S: Final = 120.0
"""A test that forgets a barrier costs this much, not a hang."""


class Holds(Protocol):
    async def at(self, stage: str, request_id: str) -> None:
        """Wait while this stage is held. May be cancelled."""

    def held(self, stage: str, request_id: str) -> bool:
        """The same as a question, for those who cannot wait and ask again later."""


class NoHolds:
    async def at(self, stage: str, request_id: str) -> None:
        return

    def held(self, stage: str, request_id: str) -> bool:
        return False


class FolderHolds:
    def __init__(self, folder: Path, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._folder = folder
        self._sleep = sleep

    async def at(self, stage: str, request_id: str) -> None:
        for _ in range(int(LONGEST_S / LOOK_EVERY_S)):
            if not self.held(stage, request_id):
                return
            await self._sleep(LOOK_EVERY_S)

    def held(self, stage: str, request_id: str) -> bool:
        if not (self._folder / stage).exists():
            return False
        # The test may remove its folder at any moment: then nothing is held.
        with contextlib.suppress(FileNotFoundError):
            reached = self._folder / f"{stage}.reached"
            reached.mkdir(exist_ok=True)
            (reached / request_id).touch()
            return True
        return False


def holds_in(folder: str | None) -> Holds:
    """Barriers watched in the folder; none without one."""
    return NoHolds() if folder is None else FolderHolds(Path(folder))
