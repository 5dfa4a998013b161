from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_transfer.api import HandoffOutcome, HandoffReport, StartReport
from kv_transfer.connector.first_outputs import FirstOutputs

REPORT = HandoffReport(outcome=HandoffOutcome.SHIPPED, pages=2, wire_bytes=64, seconds=0.5, started_at=7.0)


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int] = field(default_factory=lambda: [5])
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def told(self) -> StartReport | None:
        return StartReport.from_params(self.kv_transfer_params)


class Clock:
    at = 10.0

    def now(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def first(clock: Clock) -> FirstOutputs:
    return FirstOutputs({"d": REPORT}.get, now=clock.now)


def test_the_first_output_tells_how_long_it_queued_and_how_its_pages_came(
    first: FirstOutputs, clock: Clock
) -> None:
    first.added("d")
    clock.at = 13.0
    first.scheduled(["d"])
    clock.at = 99.0
    one, two = Output("d"), Output("d")
    first.tell([one], {"d": object()})
    first.tell([two], {"d": object()})

    assert one.told == StartReport(queued_s=3.0, handoff=REPORT)
    assert two.kv_transfer_params is None
    assert len(first) == 0


def test_an_output_that_ends_its_request_keeps_what_it_tells_already(first: FirstOutputs) -> None:
    first.added("p")
    first.scheduled(["p"])
    output = Output("p", kv_transfer_params=REPORT.to_params())
    first.tell([output], {})

    assert HandoffReport.from_params(output.kv_transfer_params) == REPORT
    assert output.told == StartReport(queued_s=0.0, handoff=None)


def test_a_step_that_gave_no_token_yet_tells_nothing(first: FirstOutputs) -> None:
    first.added("d")
    first.scheduled(["d"])
    chunk = Output("d", new_token_ids=[])
    first.tell([chunk], {"d": object()})
    last = Output("d")
    first.tell([last], {"d": object()})

    assert chunk.kv_transfer_params is None
    assert last.told is not None


def test_a_request_that_is_scheduled_again_after_a_preemption_queued_once(
    first: FirstOutputs, clock: Clock
) -> None:
    first.added("d")
    first.scheduled(["d"])
    clock.at = 50.0
    first.scheduled(["d"])
    output = Output("d")
    first.tell([output], {"d": object()})

    assert output.told is not None
    assert output.told.queued_s == 0.0


def test_requests_that_went_away_are_forgotten(first: FirstOutputs) -> None:
    for number in range(1000):
        first.added(f"gone-{number}")
        if number % 2:
            first.scheduled([f"gone-{number}"])
        first.tell([], {"alive": object()})

    assert len(first) <= 1
