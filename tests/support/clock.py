"""A clock that moves only when told to, and stops at every sleeper on its way."""

import asyncio
import heapq


class FakeClock:
    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._order = 0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        self._order += 1
        wake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, self._order, wake))
        await wake

    def jump(self, seconds: float) -> None:
        """Time passes while nothing runs: sleepers that are due wake late."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Move forward, stopping at every sleeper that is due so that its work runs at its time."""
        end = self._now + seconds
        await self._settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, wake = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            if not wake.done():
                wake.set_result(None)
            await self._settle()
        self._now = end

    async def _settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
