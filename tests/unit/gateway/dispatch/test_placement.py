"""Which replica a request gets while decode's pools fill and empty."""

import logging
from collections import deque
from itertools import pairwise

import pytest

from gateway.dispatch.placement import Placement
from gateway.metrics import GatewayMetrics
from gateway.routing.pressure import Marks
from gateway.routing.snapshot import Ask, Candidate
from kv_transfer.api import WireFormat
from workers.api import Phase

WIDE, DENSE = WireFormat.BF16, WireFormat.FP8_E4M3
PAGES = {WIDE: 100, DENSE: 200}


class Pools:
    """Two decode engines and one of prefill, as far as placement looks at a fleet."""

    def __init__(self) -> None:
        self.held = {WIDE: 0, DENSE: 0}
        self.gone: set[WireFormat] = set()

    def candidates(self, phase: Phase) -> tuple[Candidate, ...]:
        if phase is Phase.PREFILL:
            return (Candidate(replica_id="p", format=WIDE, total_pages=100, free_pages=100, load=0),)
        return tuple(
            Candidate(
                replica_id=format,
                format=format,
                total_pages=PAGES[format],
                free_pages=PAGES[format] - held,
                load=held,
            )
            for format, held in self.held.items()
            if format not in self.gone
        )


class Load:
    """Requests of four pages that stay for as many later ones as are wanted at once."""

    def __init__(self) -> None:
        self.pools, self.metrics = Pools(), GatewayMetrics()
        self.placement = Placement(self.pools, self.metrics, Marks(above=0.8, below=0.6))  # type: ignore[arg-type]
        self.inside: deque[WireFormat] = deque()
        self.arrived = 0

    def arrive(self, at_once: int) -> tuple[float, WireFormat]:
        """Pressure that the request met, and the format that it got."""
        while len(self.inside) >= at_once:
            self.pools.held[self.inside.popleft()] -= 4
        met = sum(self.pools.held.values()) / PAGES[WIDE]
        self.arrived += 1
        chosen = self.placement.choose(Phase.DECODE, Ask(request_id=str(self.arrived), pages=4))
        assert chosen is not None
        format = WireFormat(chosen)
        self.pools.held[format] += 4
        self.inside.append(format)
        return met, format

    def count(self, series: str) -> float:
        lines = self.metrics.page(0).decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(series))


def test_a_ramp_moves_new_requests_to_the_dense_pool_and_back() -> None:
    load = Load()
    ramp = [*range(1, 40), *[40] * 200, *range(40, 4, -1), *[4] * 100]
    seen = [load.arrive(at_once) for at_once in ramp]

    above = [format for met, format in seen if met >= 0.8]
    below = [format for met, format in seen if met <= 0.6]
    assert len(above) > 200
    assert len(below) > 100
    assert above.count(DENSE) >= 0.8 * len(above)
    assert below.count(WIDE) >= 0.8 * len(below)
    turns = sum(one != other for (_, one), (_, other) in pairwise(seen))
    assert turns == load.count("phasegate_decode_format_switches_total") == 2
    assert load.count('phasegate_decode_requests_total{format="fp8_e4m3"}') == sum(
        f is DENSE for _, f in seen
    )


def test_requests_that_are_held_in_between_the_marks_turn_nothing() -> None:
    load = Load()
    for at_once in [*range(1, 19), *[18] * 100]:  # 72 of 100 pages
        assert load.arrive(at_once)[1] is WIDE

    assert load.count("phasegate_decode_format_switches_total") == 0
    assert 0.6 < load.count("phasegate_decode_pages_used_ratio") < 0.8


def test_without_room_where_it_should_go_a_request_goes_where_there_is_room() -> None:
    load = Load()
    load.pools.held = {WIDE: 85, DENSE: 198}

    assert load.arrive(99)[1] is WIDE


@pytest.mark.parametrize("gone", [WIDE, DENSE])
def test_where_one_pool_is_gone_the_other_takes_all(gone: WireFormat) -> None:
    load = Load()
    load.pools.gone = {gone}
    load.pools.held = {WIDE: 90, DENSE: 0}

    assert load.arrive(99)[1] is not gone


def test_a_request_that_no_pool_can_hold_is_placed_nowhere() -> None:
    load = Load()

    assert load.placement.choose(Phase.DECODE, Ask(request_id="r", pages=201)) is None
    assert load.placement.choose(Phase.DECODE, Ask(request_id="r", pages=200)) == DENSE
    assert load.placement.choose(Phase.PREFILL, Ask(request_id="r", pages=1)) == "p"


def test_a_turn_is_logged_with_where_and_why(caplog: pytest.LogCaptureFixture) -> None:
    load = Load()
    load.pools.held = {WIDE: 30, DENSE: 50}
    with caplog.at_level(logging.INFO):
        load.arrive(99)

    assert "routing.format.switched to=fp8_e4m3 pressure=0.80" in caplog.text
