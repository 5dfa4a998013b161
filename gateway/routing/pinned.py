"""Turns the gateway's placement into the chosen Serve replica.

A call names its replica by the keyword `to`. A replica that is gone fails the call at once: falling back
to another one in silence would send a request to an engine that holds none of its pages. For the same reason
Serve would wait at a full replica for as long as it is full: here the call fails after `FULL_S`.

Calls that one request makes to one deployment share an id, by which Serve's router finds who waits. Two that
wait at once may get each other's replica: the gateway makes the next one only when the first has its own.
"""

import random
import time
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from gateway.routing import replica_table

FULL_S = 2.0
"""Replicas refuse before they are full: one that is full for so long is stuck, or flooded."""


class PinnedRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        """Nothing to set up: the table is shared by the process."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        ids = tuple(sorted(replica.replica_id.unique_id for replica in replicas))
        replica_table.publish(self._deployment_id.app_name, self._deployment_id.name, ids)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [[random.choice(candidate_replicas)]]
        # Without this the routing task asks again at once, for ever, while a replica is full.
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.kwargs.get("to")
        if wanted is None:
            return [[random.choice(candidate_replicas)]]
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == wanted:
                if _waited_s(pending_request.routing_context) > FULL_S:
                    _fail(pending_request, replica_table.ReplicaFull("the replica of a pinned call is full"))
                return [[replica]]
        _fail(pending_request, replica_table.ReplicaGone("the replica of a pinned call is gone"))
        # An empty answer would never yield, and the routing task would spin; any candidate lets it see that
        # the request is already decided.
        return [candidate_replicas[:1]]


def _waited_s(context: Any) -> float:
    """Seconds since the router first looked for this call's replica."""
    now = time.monotonic()
    if not hasattr(context, "first_look"):
        context.first_look = now
    waited: float = now - context.first_look
    return waited


def _fail(pending_request: PendingRequest, error: Exception) -> None:
    if not pending_request.future.done():
        pending_request.future.set_exception(error)
