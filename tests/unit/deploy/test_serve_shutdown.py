import asyncio
from typing import Any

import pytest

from deploy.serve_shutdown import ShutdownChanged, when_told_to_stop


async def test_the_replica_hears_of_its_end_before_serve_waits_for_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve._private import replica

    order: list[str] = []
    heard = asyncio.Event()

    async def serves_own(self: Any) -> str:
        await heard.wait()
        order.append("serve")
        return "done"

    async def begin() -> None:
        order.append("begin")
        heard.set()

    monkeypatch.setattr(replica.Replica, "_perform_graceful_shutdown", serves_own)
    when_told_to_stop(begin)
    one = replica.Replica.__new__(replica.Replica)

    assert await asyncio.wait_for(one._perform_graceful_shutdown(), 5) == "done"
    assert order == ["begin", "serve"]


async def test_a_ray_without_that_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve._private import replica

    monkeypatch.delattr(replica.Replica, "_perform_graceful_shutdown")

    with pytest.raises(ShutdownChanged):
        when_told_to_stop(asyncio.Event().wait)


async def test_the_installed_ray_has_that_place_and_its_actor_uses_it() -> None:
    import inspect

    from ray.serve._private import replica

    assert asyncio.iscoroutinefunction(replica.Replica._perform_graceful_shutdown)
    assert "_perform_graceful_shutdown" in inspect.getsource(replica.Replica.perform_graceful_shutdown)
