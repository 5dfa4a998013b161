"""Turns the gateway's placement into the chosen Serve replica.

A call names its replica by the keyword `to`. A replica that is gone fails the call at once: falling back
to another one in silence would send a request to an engine that holds none of its pages.
"""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from gateway.routing import replica_table


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
                return [[replica]]
        if not pending_request.future.done():
            gone = replica_table.ReplicaGone("the replica of a pinned call is gone")
            pending_request.future.set_exception(gone)
        # An empty answer would never yield, and the routing task would spin; any candidate lets it see that
        # the request is already decided.
        return [candidate_replicas[:1]]
