"""News for one reader: everything that came since it last looked, at once."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue that is emptied with one wake-up, however much came. One task reads; the event loop writes."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[T]:
        """All items, in order; waits while there are none."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        items, self._items = self._items, []
        return items
