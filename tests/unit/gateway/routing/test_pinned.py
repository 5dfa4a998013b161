"""The router's choice. Its life inside Serve is shown with a real cluster elsewhere."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.routing.replica_table import ReplicaFull, ReplicaGone


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def pending(**kwargs: str) -> Any:
    future = asyncio.get_running_loop().create_future()
    return SimpleNamespace(
        kwargs=kwargs, future=future, routing_context=SimpleNamespace(should_backoff=False)
    )


async def choose(request: Any, *names: str) -> list[list[str]]:
    from gateway.routing.pinned import PinnedRouter

    router = object.__new__(PinnedRouter)  # its constructor starts a router inside a Serve process
    ranks = await router.choose_replicas([replica(name) for name in names], request)
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


async def test_pinned_call_goes_to_its_replica_and_backs_off_while_that_is_full() -> None:
    request = pending(to="b")

    assert await choose(request, "a", "b", "c") == [["b"]]
    assert request.routing_context.should_backoff


async def test_call_to_a_missing_replica_fails_at_once_and_is_offered_to_nobody_else() -> None:
    request = pending(to="gone")

    ranks = await choose(request, "a", "b")

    assert ranks != [[]], "an empty rank makes the routing task spin"
    with pytest.raises(ReplicaGone):
        request.future.result()


async def test_call_that_waits_too_long_at_a_full_replica_fails_and_not_before() -> None:
    from gateway.routing.pinned import FULL_S

    request = pending(to="b")
    await choose(request, "a", "b")
    request.routing_context.first_look -= FULL_S - 0.5
    assert await choose(request, "a", "b") == [["b"]]
    assert not request.future.done()
    request.routing_context.first_look -= 1

    assert await choose(request, "a", "b") == [["b"]], "the routing task sees that it is decided"
    with pytest.raises(ReplicaFull):
        request.future.result()


async def test_call_to_nobody_in_particular_goes_to_one_that_exists() -> None:
    ((chosen,),) = await choose(pending(), "a", "b")

    assert chosen in ("a", "b")
