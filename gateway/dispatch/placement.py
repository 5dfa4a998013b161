"""Gives each request its replicas: asks the policies, and remembers which way new requests lean."""

import logging

from gateway.dispatch.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.routing.policy import choose
from gateway.routing.pressure import Marks, formats, leans_to_dense, pressure
from gateway.routing.snapshot import Ask, Candidate
from kv_transfer.api import WireFormat
from workers.api import Phase

log = logging.getLogger(__name__)
_USUAL = Marks()


class Placement:
    def __init__(self, fleet: Fleet, metrics: GatewayMetrics, marks: Marks = _USUAL) -> None:
        self._fleet, self._metrics, self._marks = fleet, metrics, marks
        self._dense = False
        """New requests go to decode engines with a denser cache."""

    def choose(self, phase: Phase, ask: Ask) -> str | None:
        """Id of the replica that takes the request; None: there is none that can."""
        candidates = self._fleet.candidates(phase)
        preferred = self._preferred(candidates) if phase is Phase.DECODE else None
        chosen = choose(ask, candidates, preferred=preferred)
        if chosen is None:
            return None
        if phase is Phase.DECODE:
            self._metrics.decode_format(chosen.format)
        return chosen.replica_id

    def _preferred(self, candidates: tuple[Candidate, ...]) -> WireFormat | None:
        if (there := formats(candidates)) is None:
            return None
        used = pressure(candidates, there.wide)
        self._metrics.decode_pressure(used)
        dense = leans_to_dense(self._dense, used, self._marks)
        if dense is not self._dense:
            self._dense = dense
            self._metrics.decode_format_switched()
            to = there.dense if dense else there.wide
            log.info("routing.format.switched to=%s pressure=%.2f wide=%s", to, used, there.wide)
        return there.dense if dense else there.wide
