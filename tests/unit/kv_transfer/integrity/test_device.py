"""The check for a device: the same verdicts, later; the copy of the shadow that lies there; nothing waits."""

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.device import DeviceChecker, Seen, Sighting
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Finding, Tables
from tests.support.toy_pool import ToyPool, random_step

PAGES, SIZE = 10, 4
CPU = torch.device("cpu")


def a_checker(device: torch.device = CPU, groups: int = 1) -> DeviceChecker:
    """Request `a` has pages 3 and 4, `b` has 5; six and two tokens are computed."""
    checker = DeviceChecker(PAGES, [GroupShape(SIZE)] * groups, device, now=lambda: 0.0)
    checker.apply(LedgerDelta(tags={page: 100 + page for page in range(PAGES)}))
    checker.apply(
        LedgerDelta(
            grown=[
                RowGrowth(name, group, 0, pages, [100 + page for page in pages], [True] * len(pages))
                for group in range(groups)
                for name, pages in (("a", [3, 4]), ("b", [5]))
            ]
        )
    )
    return checker


PLAN = {"a": (6, 1), "b": (2, 1)}


def a_step(first: int = 3, device: torch.device = CPU) -> Tables:
    """One token each; `a`'s first page as given."""
    return Tables(
        torch.tensor([[first, 4, 9], [5, 9, 9]], dtype=torch.int32).to(device),
        torch.tensor([7, 3], dtype=torch.int32).to(device),
        torch.tensor([0, 1, 2], dtype=torch.int32).to(device),
        torch.tensor([4 * SIZE + 2, 5 * SIZE + 2], dtype=torch.int64).to(device),
    )


@pytest.mark.timeout(90)
@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_after_each_step_the_device_has_what_the_shadow_has(seed: int) -> None:
    rnd = random.Random(seed)
    ledger = GenerationLedger(14, 2, free=range(1, 14))
    pool = ToyPool(14, 2, [ledger])
    checker = DeviceChecker(14, [GroupShape(4), GroupShape(4, 8)], CPU, now=lambda: 0.0)
    for count in range(25):
        random_step(rnd, pool, count)
        checker.apply(ledger.take_delta())

        assert checker._page_tags.tolist() == checker.shadow.tags.tolist()
        for mirror, rows in zip(checker._mirrors, checker.shadow.rows, strict=True):
            assert np.array_equal(mirror.pages.numpy(), rows.pages)
            assert np.array_equal(mirror.own.numpy(), rows.own)
            assert np.array_equal(mirror.tags.numpy(), rows.tags)


def test_a_right_step_is_passed_and_stays_as_it_is() -> None:
    checker, tables = a_checker(), a_step()

    assert checker.check([(0, tables)], ["a", "b"], PLAN).read() == {}
    assert tables.block_table.tolist() == a_step().block_table.tolist()
    assert (checker.counts.steps, checker.counts.pages) == (1, 3)


def test_who_is_flagged_is_masked_then_and_poisoned_until_its_place_is_anothers() -> None:
    checker, wrong = a_checker(), a_step(first=8)
    verdict = checker.check([(0, wrong)], ["a", "b"], PLAN)
    later = a_step()
    again = checker.check([(0, later)], ["a", "b"], PLAN)

    assert verdict.read() == {"a": Sighting(0, Finding.READ, 0, 8)}
    assert again.read() == {"a": Sighting(0, Finding.POISONED, 0, 0)}
    for tables in (wrong, later):
        assert tables.block_table.tolist() == [[0, 0, 0], [5, 9, 9]]
        assert tables.slot_mapping.tolist() == [-1, 5 * SIZE + 2]
    tags = {3: 203, 4: 204}
    checker.apply(
        LedgerDelta(dropped=["a"], tags=tags, grown=[RowGrowth("c", 0, 0, [3, 4], [203, 204], [True, True])])
    )
    assert checker.check([(0, a_step())], ["c", "b"], {"c": (6, 1), "b": (2, 1)}).read() == {}


def test_what_is_wrong_in_one_group_is_masked_in_all() -> None:
    checker = a_checker(groups=2)
    right, wrong = a_step(), a_step(first=8)
    verdict = checker.check([(0, right), (1, wrong)], ["a", "b"], PLAN)

    assert verdict.read() == {"a": Sighting(1, Finding.READ, 0, 8)}
    assert right.block_table.tolist() == wrong.block_table.tolist() == [[0, 0, 0], [5, 9, 9]]


def test_poison_stays_where_it_is_when_more_requests_come() -> None:
    checker = a_checker()
    checker.check([(0, a_step(first=8))], ["a", "b"], PLAN)
    before = checker.shadow.room
    more = [RowGrowth(f"m{n}", 0, 0, [1], [101], [False]) for n in range(2 * before)]
    checker.apply(LedgerDelta(grown=more))

    assert checker.shadow.room > before
    assert checker.check([(0, a_step())], ["a", "b"], PLAN).read().keys() == {"a"}


def test_a_verdict_crosses_processes_as_what_it_says() -> None:
    checker = a_checker()
    verdict = checker.check([(0, a_step(first=8))], ["a", "b"], PLAN)

    assert copy.copy(verdict) == Seen(verdict.read())  # in the way that vLLM sends it


def test_nothing_in_a_step_waits_for_the_device() -> None:
    """On a device of shapes without values: whoever asks for a value raises."""
    meta = torch.device("meta")
    with pytest.raises(RuntimeError):
        bool(torch.zeros(1, device=meta).any())
    checker = a_checker(meta, groups=2)
    checker.apply(LedgerDelta(dropped=["b"], tags={5: 500}))
    tables = [(group, a_step(device=meta)) for group in range(2)]
    checker.check(tables, ["a", "b"], PLAN)

    assert checker.counts.steps == 1


def test_a_page_that_changed_hands_is_wrong_though_the_table_shows_it() -> None:
    checker = a_checker()
    checker.apply(LedgerDelta(tags={3: 999}))

    assert checker.check([(0, a_step())], ["a", "b"], PLAN).read() == {"a": Sighting(0, Finding.READ, 0, 3)}
