from collections import Counter

import pytest

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.prestep import Rights, judge, rights_of
from tests.support.toy_pool import ToyPool

ZERO, COPY = IntegrityCause.ZERO_TARGET, IntegrityCause.COW_SOURCE
PAGES = 10


@pytest.fixture
def pool() -> ToyPool:
    pool = ToyPool(PAGES, 1, [GenerationLedger(PAGES, 1, free=range(1, PAGES))])
    pool.admit("a", 1, 2)
    pool.publish("a", 0)
    pool.admit("b", 1, 1)  # page 1 is a's and b's, page 3 is b's
    return pool


def test_only_a_fresh_page_of_one_owner_may_be_cleared_or_copied_to(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    rights = rights_of(ledger, [1, 2, 3, 7], [(1, 3), (3, 1), (7, 3)])

    assert rights.clear == {2: (ledger.tag(2), "a"), 3: (ledger.tag(3), "b")}
    assert rights.copy == {(1, 3): (ledger.tag(1), ledger.tag(3), "b")}


def test_a_page_of_an_earlier_step_is_neither_cleared_nor_copied_to(pool: ToyPool) -> None:
    """It has been written to, also where its one owner is who it was allocated for."""
    (ledger,) = pool.ledgers
    ledger.take_delta()

    assert not rights_of(ledger, [2, 3], [(1, 3)])

    pool.extend("a", 1)
    fresh = pool.tables["a"][0][-1]
    assert rights_of(ledger, [fresh], []).clear == {fresh: (ledger.tag(fresh), "a")}


def test_nothing_is_copied_from_another_tenant(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    pool.admit("x", 2, 1)
    page = pool.tables["x"][0][0]

    assert rights_of(ledger, [], [(page, 3)]).copy == {}


def test_nothing_is_copied_from_a_page_that_was_given_back(pool: ToyPool) -> None:
    """It keeps its tenant's domain until somebody gets it."""
    (ledger,) = pool.ledgers
    pool.admit("c", 1, 1)
    page = pool.tables["c"][0][-1]
    assert rights_of(ledger, [], [(page, 3)]).copy.keys() == {(page, 3)}
    pool.finish("c")

    assert rights_of(ledger, [], [(page, 3)]).copy == {}


def test_what_is_rightful_runs(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    judged = judge([2], [(1, 3)], rights_of(ledger, [2], [(1, 3)]), ledger.tag)

    assert (judged.clear, judged.copies, judged.faults, judged.refused) == ([2], [(1, 3)], {}, [])


def test_a_wrong_target_is_not_cleared_and_who_waits_for_a_clear_page_ends(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    judged = judge([1], [], rights_of(ledger, [3], []), ledger.tag)

    assert judged.clear == []
    assert judged.refused == [ZERO]
    assert judged.faults == {"b": PageFault(ZERO, 3, ledger.tag(3), ledger.tag(3))}


def test_a_target_too_many_is_not_cleared_and_nobody_ends(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    judged = judge([3, 2], [], rights_of(ledger, [3], []), ledger.tag)

    assert (judged.clear, judged.faults, judged.refused) == ([3], {}, [ZERO])


def test_a_wrong_source_is_not_copied_from_and_its_targets_owner_ends(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    judged = judge([], [(2, 3)], rights_of(ledger, [], [(1, 3)]), ledger.tag)

    assert judged.copies == []
    assert judged.refused == [COPY]
    assert judged.faults == {"b": PageFault(COPY, 3, ledger.tag(3), ledger.tag(2))}


def test_a_page_that_changed_hands_on_the_way_is_neither_cleared_nor_copied(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers
    rights = rights_of(ledger, [2], [(1, 3)])

    judged = judge([2], [(1, 3)], rights, lambda _: 0)

    assert (judged.clear, judged.copies) == ([], [])
    assert Counter(judged.refused) == Counter([ZERO, COPY])
    assert {name: (fault.cause, fault.found) for name, fault in judged.faults.items()} == {
        "a": (ZERO, 0),
        "b": (COPY, 0),
    }


@pytest.mark.parametrize("changed", [1, 3], ids=["source", "target"])
def test_a_copy_needs_both_its_pages_as_they_were(pool: ToyPool, changed: int) -> None:
    (ledger,) = pool.ledgers
    rights = rights_of(ledger, [], [(1, 3)])
    judged = judge([], [(1, 3)], rights, lambda page: 0 if page == changed else ledger.tag(page))

    assert judged.copies == []
    assert judged.faults.keys() == {"b"}


def test_rights_are_something_where_there_is_anything_to_clear_or_to_copy(pool: ToyPool) -> None:
    (ledger,) = pool.ledgers

    assert not Rights()
    assert rights_of(ledger, [2], [])
    assert rights_of(ledger, [], [(1, 3)])
