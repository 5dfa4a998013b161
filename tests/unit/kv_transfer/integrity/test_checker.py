"""One step of a worker: who is flagged, why, and what becomes of the tables."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.causes import NOWHERE
from kv_transfer.integrity.checker import Checker
from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Tables

SIZE = 4
PAGES = 20


@dataclass
class Bench:
    """`a` decodes in pages 1, 2; `b` has hit page 1 and prefills 3, 4; `c` decodes in 5."""

    checker: Checker = field(default_factory=lambda: Checker(PAGES, [GroupShape(SIZE)], now=lambda: 0.0))
    plan: dict[str, tuple[int, int]] = field(default_factory=lambda: {"a": (5, 1), "b": (4, 6), "c": (2, 1)})

    def __post_init__(self) -> None:
        self.pages = {"a": [1, 2], "b": [1, 3, 4], "c": [5]}
        own = {"a": [True, True], "b": [False, True, True], "c": [True]}
        self.checker.apply(
            LedgerDelta(
                tags={page: 100 + page for page in range(PAGES)},
                grown=[
                    RowGrowth(name, 0, 0, pages, [100 + p for p in pages], own[name])
                    for name, pages in self.pages.items()
                ],
            )
        )
        self.tables = self.right_tables()

    def right_tables(self) -> Tables:
        table = np.full((5, 6), 19, np.int32)
        slots: list[int] = []
        for row, (name, (computed, scheduled)) in enumerate(self.plan.items()):
            pages = self.pages[name]
            table[row, : len(pages)] = pages
            slots += [pages[p // SIZE] * SIZE + p % SIZE for p in range(computed, computed + scheduled)]
        lengths = np.array([*(c + s for c, s in self.plan.values()), 0, 0], np.int32)
        starts = np.cumsum([0, *(s for _, s in self.plan.values()), 0, 0]).astype(np.int32)
        return Tables(table, lengths, starts, np.array([*slots, 76, 77], np.int64))

    def check(self) -> dict[str, PageFault]:
        return self.checker.check([(0, self.tables)], list(self.plan), self.plan)

    def untouched(self, *names: str) -> None:
        """These rows are as they were."""
        right = self.right_tables()
        for row, name in enumerate(self.plan):
            if name in names:
                tokens = slice(*right.query_start_loc[row : row + 2])
                assert self.tables.block_table[row].tolist() == right.block_table[row].tolist()
                assert self.tables.slot_mapping[tokens].tolist() == right.slot_mapping[tokens].tolist()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_right_step_flags_nobody_and_is_counted(bench: Bench) -> None:
    assert bench.check() == {}
    bench.untouched("a", "b", "c")
    assert (bench.checker.counts.steps, bench.checker.counts.pages) == (1, 6)


@pytest.mark.parametrize(
    ("page", "cause", "found"),
    [
        (3, IntegrityCause.REALLOCATED, 103),
        (2, IntegrityCause.SHIFTED, 102),
        (0, IntegrityCause.FREED, 100),
        (-1, IntegrityCause.FREED, 0),
        (PAGES, IntegrityCause.FREED, 0),
    ],
)
def test_a_wrong_entry_ends_its_request_alone(
    bench: Bench, page: int, cause: IntegrityCause, found: int
) -> None:
    bench.tables.block_table[0, 0] = page

    assert bench.check() == {"a": PageFault(cause, page, 101, found)}
    assert not bench.tables.block_table[0].any()
    assert bench.tables.slot_mapping[0] == -1
    bench.untouched("b", "c")


def test_a_page_that_changed_hands_ends_those_who_still_show_it(bench: Bench) -> None:
    bench.checker.apply(LedgerDelta(tags={5: 999}))

    assert bench.check() == {"c": PageFault(IntegrityCause.REALLOCATED, 5, 105, 999)}
    bench.untouched("a", "b")


def test_a_page_that_was_given_to_another_is_the_others(bench: Bench) -> None:
    """Page 2, to which `a` was about to write, is fresh and d's."""
    bench.checker.apply(LedgerDelta(tags={2: 999}, grown=[RowGrowth("d", 0, 0, [2], [999], [True])]))
    bench.pages["d"], bench.plan["d"] = [2], (0, 2)
    bench.tables = bench.right_tables()

    assert bench.check() == {"a": PageFault(IntegrityCause.REALLOCATED, 2, 102, 999)}
    bench.untouched("b", "c", "d")


@pytest.mark.parametrize("slot", [5 * SIZE, -1, 2 * SIZE + 2, 2**40])
def test_a_write_elsewhere_ends_its_request(bench: Bench, slot: int) -> None:
    bench.tables.slot_mapping[0] = slot

    faults = bench.check()

    assert {name: fault.cause for name, fault in faults.items()} == {"a": IntegrityCause.UNEXPECTED_WRITE}
    assert bench.tables.slot_mapping[0] == -1
    bench.untouched("b", "c")


def test_a_wrong_length_ends_its_request(bench: Bench) -> None:
    bench.tables.seq_lens[2] = 4

    assert {name: fault.cause for name, fault in bench.check().items()} == {"c": IntegrityCause.SHIFTED}
    assert bench.tables.seq_lens[2] == 3


def test_a_request_that_was_never_told_of_is_flagged(bench: Bench) -> None:
    faults = bench.checker.check([(0, bench.tables)], ["a", "b", "stranger"], bench.plan)

    assert faults == {"stranger": NOWHERE}
    bench.untouched("a", "b")


def test_a_request_that_was_never_told_of_takes_no_pages_from_others(bench: Bench) -> None:
    """Its slot is -1, which is the last row in numpy's eyes: that of `last`."""
    room = bench.checker.shadow.room
    more = [RowGrowth(f"m{n}", 0, 0, [9], [109], [False]) for n in range(room - 4)]
    bench.checker.apply(LedgerDelta(grown=[*more, RowGrowth("last", 0, 0, [7], [107], [True])]))
    assert bench.checker.shadow.slot("last") == room - 1
    bench.pages["last"], bench.plan["last"] = [7], (2, 1)
    bench.tables = bench.right_tables()

    faults = bench.checker.check(
        [(0, bench.tables)], ["a", "b", "stranger", "last"], bench.plan | {"stranger": (2, 1)}
    )

    assert faults.keys() == {"stranger"}
    bench.untouched("a", "b", "last")


def test_who_loses_a_page_takes_none_from_who_has_the_caches_last_one(bench: Bench) -> None:
    """Where a page was lost -1 stands, which is the last page in numpy's eyes."""
    last = PAGES - 1
    bench.checker.apply(
        LedgerDelta(tags={2: 999}, grown=[RowGrowth("d", 0, 0, [last], [100 + last], [True])])
    )
    bench.pages["d"], bench.plan["d"] = [last], (0, 2)
    bench.tables = bench.right_tables()

    assert bench.check().keys() == {"a"}
    assert bench.checker.shadow.tags[last] == 100 + last
    bench.untouched("b", "c", "d")


def test_a_page_that_a_flagged_request_only_fills_up_is_not_there_either(bench: Bench) -> None:
    bench.plan["a"] = (5, 3)
    bench.checker.apply(
        LedgerDelta(grown=[RowGrowth("d", 0, 0, [1, 2, 8], [101, 102, 108], [False] * 2 + [True])])
    )
    bench.pages["d"], bench.plan["d"] = [1, 2, 8], (8, 1)
    bench.tables = bench.right_tables()
    assert bench.check() == {}

    bench.tables.block_table[0, 0] = 7

    assert bench.check().keys() == {"a", "d"}
    bench.untouched("b", "c")


def test_requests_that_come_back_under_their_names_lie_elsewhere(bench: Bench) -> None:
    """Preempted and resumed: the batch is the same, their rows are not."""
    assert bench.check() == {}
    before = [bench.checker.shadow.slot(name) for name in "ac"]
    grown = [
        RowGrowth(
            name,
            0,
            0,
            bench.pages[name],
            [100 + p for p in bench.pages[name]],
            [True] * len(bench.pages[name]),
        )
        for name in "ca"
    ]
    bench.checker.apply(LedgerDelta(dropped=["c", "a"], grown=[grown[1], grown[0]]))
    if [bench.checker.shadow.slot(name) for name in "ac"] == before:
        bench.checker.apply(LedgerDelta(dropped=["c", "a"], grown=grown))

    assert [bench.checker.shadow.slot(name) for name in "ac"] != before
    assert bench.check() == {}


def test_who_reads_what_a_flagged_request_was_to_write_is_flagged_with_it(bench: Bench) -> None:
    """`d` was admitted in the same step, and found b's page 3 by a hash that was made while scheduling."""
    bench.checker.apply(LedgerDelta(grown=[RowGrowth("d", 0, 0, [3, 6], [103, 106], [False, True])]))
    bench.pages["d"] = [3, 6]
    bench.plan["d"] = (4, 1)
    bench.tables = bench.right_tables()
    assert bench.check() == {}

    bench.tables.block_table[1, 0] = 5

    causes = {name: fault.cause for name, fault in bench.check().items()}
    assert causes == {"b": IntegrityCause.REALLOCATED, "d": IntegrityCause.STALE_PREFIX}
    bench.untouched("a", "c")
    later = {"e": (4, 1)}
    bench.pages = {"e": [3, 7]}
    bench.plan = later
    bench.checker.apply(LedgerDelta(grown=[RowGrowth("e", 0, 0, [3, 7], [103, 107], [False, True])]))
    bench.tables = bench.right_tables()
    assert {name: fault.cause for name, fault in bench.check().items()} == {"e": IntegrityCause.STALE_PREFIX}


def test_who_was_wrong_before_the_forward_writes_nothing_and_its_reader_is_flagged(bench: Bench) -> None:
    """Its page was not cleared, say: what it computed would be made of whatever lies there."""
    bench.checker.apply(LedgerDelta(grown=[RowGrowth("d", 0, 0, [3, 6], [103, 106], [False, True])]))
    bench.pages["d"], bench.plan["d"] = [3, 6], (4, 1)
    bench.tables = bench.right_tables()

    faults = bench.checker.check([(0, bench.tables)], list(bench.plan), bench.plan, wrong={"b", "stranger"})

    assert {name: fault.cause for name, fault in faults.items()} == {"d": IntegrityCause.STALE_PREFIX}
    assert not bench.tables.block_table[1].any()
    assert (bench.tables.slot_mapping[1:7] == -1).all()
    bench.untouched("a", "c")


def test_who_reads_what_they_were_to_write_is_flagged_with_them(bench: Bench) -> None:
    """`d` has b's page 3, and `e` d's page 6: what d writes in this step is not there either."""
    for name, pages, own, plan in (
        ("d", [3, 6], [False, True], (4, 4)),
        ("e", [6, 8], [False, True], (4, 1)),
    ):
        bench.checker.apply(LedgerDelta(grown=[RowGrowth(name, 0, 0, pages, [100 + p for p in pages], own)]))
        bench.pages[name], bench.plan[name] = pages, plan
    bench.tables = bench.right_tables()
    assert bench.check() == {}

    bench.tables.block_table[1, 0] = 5

    assert bench.check().keys() == {"b", "d", "e"}
    bench.untouched("a", "c")


def test_a_request_that_would_write_to_anothers_page_does_not_take_the_page_from_it(bench: Bench) -> None:
    bench.plan["b"] = (3, 7)  # its first token falls into page 1, which is a's
    bench.tables = bench.right_tables()

    faults = bench.check()

    assert faults == {"b": PageFault(IntegrityCause.UNEXPECTED_WRITE, 1, 101, 101)}
    bench.untouched("a", "c")


def test_every_group_is_checked_and_contained_together() -> None:
    checker = Checker(PAGES, [GroupShape(SIZE), GroupShape(SIZE, 4)], now=lambda: 0.0)
    checker.apply(
        LedgerDelta(
            tags={page: 100 + page for page in range(PAGES)},
            grown=[
                RowGrowth("a", 0, 0, [1, 2], [101, 102], [True, True]),
                RowGrowth("a", 1, 0, [0, 3], [0, 103], [False, True]),
            ],
        )
    )
    start = np.array([0, 1], np.int32)
    groups = [
        Tables(np.array([[1, 2]], np.int32), np.array([8], np.int32), start, np.array([2 * SIZE + 3])),
        Tables(np.array([[9, 4]], np.int32), np.array([8], np.int32), start, np.array([3 * SIZE + 3])),
    ]

    faults = checker.check(list(enumerate(groups)), ["a"], {"a": (7, 1)})

    assert faults == {"a": PageFault(IntegrityCause.REALLOCATED, 4, 103, 104)}
    assert [g.slot_mapping.tolist() for g in groups] == [[-1], [-1]]
    assert not any(g.block_table.any() for g in groups)
