"""What the ranks of one engine saw becomes one story: nobody's fault is lost, and the worst decides."""

import pytest

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.handoff import HandoffOutcome, HandoffReport
from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.connector.metadata import WorkerNews
from kv_transfer.integrity.checker import CheckCounts
from kv_transfer.integrity.device import Seen, Sighting
from kv_transfer.integrity.verify import Finding

FAULT = PageFault(IntegrityCause.REALLOCATED, 3, 30, 31)
OTHER = PageFault(IntegrityCause.FREED, 4, 40, 41)
SEEN = Sighting(0, Finding.READ, 1, 5)


def whole(seconds: float, wire_bytes: int) -> HandoffReport:
    return HandoffReport(
        outcome=HandoffOutcome.SHIPPED, pages=3, wire_bytes=wire_bytes, seconds=seconds, started_at=1.0
    )


def broken(cause: TransferCause) -> HandoffReport:
    return HandoffReport(
        outcome=HandoffOutcome.RECOMPUTED, pages=1, wire_bytes=10, seconds=0.1, started_at=1.0, cause=cause
    )


def both_ways(one: WorkerNews, other: WorkerNews) -> list[WorkerNews]:
    return [one.aggregate(other), other.aggregate(one)]


def test_a_fault_on_either_rank_ends_its_request() -> None:
    for merged in both_ways(WorkerNews(faults={"a": FAULT}), WorkerNews(faults={"b": OTHER})):
        assert merged.faults == {"a": FAULT, "b": OTHER}
    for merged in both_ways(WorkerNews(faults={"a": FAULT}), WorkerNews()):
        assert merged.faults == {"a": FAULT}


def test_what_either_device_saw_is_kept() -> None:
    for merged in both_ways(WorkerNews(verdict=Seen({"a": SEEN})), WorkerNews(verdict=Seen({"b": SEEN}))):
        assert merged.verdict.read() == {"a": SEEN, "b": SEEN}


def test_what_either_rank_refused_is_kept() -> None:
    one, other = IntegrityCause.ZERO_TARGET, IntegrityCause.PAYLOAD_CHECKSUM
    for merged in both_ways(WorkerNews(refused=[one]), WorkerNews(refused=[other])):
        assert sorted(merged.refused) == sorted([one, other])


def test_the_rank_that_checked_least_and_took_longest_speaks_for_all() -> None:
    idle, slow, blind = CheckCounts(9, 0, 90, 0.1), CheckCounts(9, 0, 90, 0.3), CheckCounts(8, 1, 80, 0.2)
    for merged in both_ways(WorkerNews(counts=idle), WorkerNews(counts=slow)):
        assert merged.counts == slow
    for merged in both_ways(WorkerNews(counts=slow), WorkerNews(counts=blind)):
        assert merged.counts == blind


def test_bytes_of_a_transfer_add_up_and_the_slower_rank_says_how_long_it_took() -> None:
    for merged in both_ways(WorkerNews({"a": whole(0.2, 100)}), WorkerNews({"a": whole(0.5, 100)})):
        assert merged.reports == {"a": whole(0.5, 200)}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_transfer_that_broke_on_one_rank_was_not_received(rank: int) -> None:
    cause = TransferCause.LINK_DOWN
    pair = both_ways(WorkerNews({"a": whole(0.2, 100)}), WorkerNews({"a": broken(cause)}))
    report = pair[rank].reports["a"]
    assert (report.outcome, report.cause) == (HandoffOutcome.RECOMPUTED, cause)


def test_transfers_of_one_rank_alone_are_told_too() -> None:
    for merged in both_ways(WorkerNews({"a": whole(0.2, 1)}), WorkerNews({"b": whole(0.3, 2)})):
        assert merged.reports == {"a": whole(0.2, 1), "b": whole(0.3, 2)}
