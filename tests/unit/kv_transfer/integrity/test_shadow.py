"""The shadow follows the ledger through random lives, with nothing but the steps' changes."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.shadow import STALE, GroupShape, Shadow
from tests.support.toy_pool import ToyPool, random_step

PAGES, GROUPS = 14, 2


def follows(shadow: Shadow, ledger: GenerationLedger, requests: list[str]) -> None:
    assert [int(tag) for tag in shadow.tags] == [ledger.tag(page) for page in range(PAGES)]
    assert len(shadow) == len(requests)
    for request_id in requests:
        slot = shadow.slot(request_id)
        for group in range(GROUPS):
            row = ledger.row(request_id, group)
            rows = shadow.rows[group]
            right = [page if tag and ledger.tag(page) == tag else STALE for page, tag in row]
            assert rows.pages[slot, : len(row)].tolist() == right
            assert (rows.pages[slot, len(row) :] == STALE).all()
            assert rows.own[slot, : len(row)].tolist() == [
                tag != 0 and ledger.writer(page) == request_id and ledger.tag(page) == tag
                for page, tag in row
            ]


@pytest.mark.timeout(90)
@settings(max_examples=80)
@given(st.integers(0, 10**9))
def test_after_each_step_the_shadow_shows_what_the_ledger_knows(seed: int) -> None:
    rnd = random.Random(seed)
    ledger = GenerationLedger(PAGES, GROUPS, free=range(1, PAGES))
    pool = ToyPool(PAGES, GROUPS, [ledger])
    shadow = Shadow(PAGES, [GroupShape(4), GroupShape(4, 8)], rows=1, width=1)
    for count in range(25):
        random_step(rnd, pool, count)
        shadow.apply(ledger.take_delta())
        follows(shadow, ledger, sorted(pool.tables))


def a_shadow() -> Shadow:
    shadow = Shadow(10, [GroupShape(4)], rows=1, width=1)
    shadow.apply(LedgerDelta(tags={page: 100 + page for page in range(10)}))
    shadow.apply(LedgerDelta(grown=[RowGrowth("a", 0, 0, [3, 4], [103, 104], [False, True])]))
    shadow.apply(LedgerDelta(grown=[RowGrowth("b", 0, 0, [3, 5], [103, 105], [False, True])]))
    return shadow


@pytest.mark.parametrize("how", ["retagged", "revoked"])
def test_a_page_that_changes_under_its_rows_can_equal_no_table_any_more(how: str) -> None:
    shadow = a_shadow()
    if how == "retagged":
        shadow.apply(LedgerDelta(tags={3: 999}))
    else:
        shadow.revoke([3])

    rows = shadow.rows[0]
    assert rows.pages[[shadow.slot("a"), shadow.slot("b")], :2].tolist() == [[STALE, 4], [STALE, 5]]
    assert rows.given[shadow.slot("a"), :2].tolist() == [3, 4]


def test_who_is_given_a_revoked_page_later_is_given_nothing_until_it_is_allocated_anew() -> None:
    shadow = a_shadow()
    shadow.revoke([4])
    shadow.apply(LedgerDelta(grown=[RowGrowth("c", 0, 0, [4], [104], [False])]))
    rows = shadow.rows[0]
    assert rows.pages[shadow.slot("c"), 0] == STALE

    shadow.apply(LedgerDelta(tags={4: 500}, grown=[RowGrowth("d", 0, 0, [4], [500], [True])]))
    assert rows.pages[shadow.slot("d"), 0] == 4


def test_a_page_may_be_dropped_and_given_to_another_in_one_step() -> None:
    shadow = a_shadow()
    shadow.apply(LedgerDelta(dropped=["a"], tags={4: 444}, grown=[RowGrowth("c", 0, 0, [4], [444], [True])]))

    assert "a" not in shadow
    assert shadow.slot("a") == -1
    assert shadow.rows[0].pages[shadow.slot("c"), 0] == 4
    assert np.count_nonzero(shadow.rows[0].pages == 4) == 1


def test_the_place_of_one_that_is_gone_is_given_to_another() -> None:
    shadow = a_shadow()
    room = shadow.room
    for number in range(3 * room):
        shadow.apply(LedgerDelta(grown=[RowGrowth(f"r{number}", 0, 0, [6], [106], [True])]))
        shadow.apply(LedgerDelta(dropped=[f"r{number}"]))

    assert shadow.room <= 2 * room
    assert not shadow._holders[6]
