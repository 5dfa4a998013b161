"""Tells a replica that it is to stop while it still has time to do something about it.

Ray Serve 2.60 waits up to `graceful_shutdown_timeout_s` for the requests in a replica and then kills it; its
own code hears of the end only after the last request. Streams that take longer would be cut with HTTP 200 and
no word. There is no hook for the beginning.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class ShutdownChanged(RuntimeError):
    """This Ray ends replicas in another way: how streams end must be looked at anew."""


def when_told_to_stop(begin: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run `begin` beside Serve's own shutdown of this replica, from its first moment.

    Call it in the replica's event loop.

    Raises:
        ShutdownChanged: there is no such place in this version of Ray.
    """
    from ray.serve._private import replica

    perform = getattr(replica.Replica, "_perform_graceful_shutdown", None)
    if not asyncio.iscoroutinefunction(perform):
        raise ShutdownChanged("ray.serve._private.replica.Replica has no _perform_graceful_shutdown")
    loop = asyncio.get_running_loop()
    running: list[object] = []

    async def told(self: Any) -> Any:
        running.append(asyncio.run_coroutine_threadsafe(begin(), loop))
        return await perform(self)

    replica.Replica._perform_graceful_shutdown = told
