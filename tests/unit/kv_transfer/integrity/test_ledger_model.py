"""The ledger against one that is slow and obviously right, through random lives of requests, with faults."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.ledger import GenerationLedger
from tests.support.slow_ledger import SlowLedger
from tests.support.toy_pool import ToyPool

PAGES, GROUPS = 14, 2


class BothLedgers:
    """What happens, each told to both; `n` and `m` choose whom it happens to."""

    def __init__(self) -> None:
        self.fast = GenerationLedger(PAGES, GROUPS, free=range(1, PAGES))
        self.slow = SlowLedger(PAGES, GROUPS, free=range(1, PAGES))
        self.pool = Checking(PAGES, GROUPS, [self.fast, self.slow])
        self.count = 0
        self.replayed: dict[str, list[list[tuple[int, int, bool]]]] = {}
        self.tags = [0] * PAGES
        self.faulty = False

    def chosen(self, n: int) -> str:
        return sorted(self.pool.tables)[n % len(self.pool.tables)]

    def some_page(self, n: int) -> int:
        pages = sorted({p for t in self.pool.tables.values() for row in t for p in row if p})
        return pages[n % len(pages)] if pages else 0

    def admit(self, n: int, m: int) -> None:
        self.count += 1
        self.pool.admit(f"r{self.count}", 1 + n % 2, 1 + m % 3)

    def extend(self, n: int, m: int) -> None:
        self.pool.extend(self.chosen(n), 1 + m % 2)

    def slide(self, n: int, m: int) -> None:
        self.pool.slide(self.chosen(n), m % GROUPS, 1 + m % 4, then_extend=m % 3)

    def publish(self, n: int, m: int) -> None:
        self.pool.publish(self.chosen(n), m % 4)

    def finish(self, n: int, m: int) -> None:
        self.pool.finish(self.chosen(n), hold=bool(m % 2))

    def release_held(self, n: int, m: int) -> None:
        self.pool.release_held()

    def fault_free_a_live_page(self, n: int, m: int) -> None:
        page = self.some_page(n)
        if page and self.pool.references[page]:
            self.faulty = True
            self.pool.free(page)

    def fault_give_a_page_to_another(self, n: int, m: int) -> None:
        page = self.some_page(n)
        if page:
            self.faulty = True
            victim = self.chosen(m)
            self.pool.references[page] += m % 2
            self.pool.tables[victim][0].append(page)
            self.pool.tell("grow", victim, [[page], []])

    def fault_queue(self, n: int, m: int) -> None:
        references = m % 2
        page = self.pool.queue[0] if self.pool.queue and not references else self.some_page(n)
        if page:
            self.faulty = True
            if self.pool.tell("queued", page, references):
                self.pool.queue.append(page)

    def fault_allocate_what_is_owned(self, n: int, m: int) -> None:
        page = self.some_page(n)
        if page:
            self.faulty = True
            self.pool.tell("allocated", page)

    def step(self, n: int, m: int) -> None:
        flagged = []
        for ledger in (self.fast, self.slow):
            ledger.reconcile(self.pool.references.__getitem__, lambda: self.pool.held)
            flagged.append(ledger.take_flagged())
        assert flagged[0] == flagged[1], flagged
        if not self.faulty:
            assert flagged[0] == {}
            assert self.fast.counts == Counter()
        self.replay(self.fast.take_delta())
        assert self.tags == self.slow.tags
        assert self.replayed.keys() == self.slow.rows.keys()
        for request_id, rows in self.slow.rows.items():
            for got, row in zip(self.replayed[request_id], rows, strict=True):
                assert len(got) == len(row)
                for entry, e in zip(got, row, strict=True):
                    assert e.lost or entry == (e.page, e.tag, e.own)

    def replay(self, delta: LedgerDelta) -> None:
        for request_id in delta.dropped:
            del self.replayed[request_id]
        for skip in delta.skipped:
            row = self.replayed[skip.request_id][skip.group]
            row[skip.start : skip.end] = [(0, 0, False)] * (skip.end - skip.start)
        for page, tag in delta.tags.items():
            self.tags[page] = tag
        for grown in delta.grown:
            rows = self.replayed.setdefault(grown.request_id, [[] for _ in range(GROUPS)])
            assert len(rows[grown.group]) == grown.start
            rows[grown.group] += zip(grown.pages, grown.tags, grown.own, strict=True)

    def know_the_same(self) -> None:
        for page in range(PAGES):
            assert self.fast.owners(page) == self.slow.owners(page), page
            assert self.fast.tag(page) == self.slow.tags[page]
            assert self.fast.is_free(page) == (page in self.slow.free)
            assert self.fast.writer(page) == self.slow.writers.get(page)
        assert self.fast.counts == self.slow.counts
        assert self.fast.bindings == len(self.slow.bindings)


class Checking(ToyPool):
    """Both ledgers must answer alike."""

    def tell(self, event: str, *args: Any) -> Any:
        fast, slow = (getattr(ledger, event)(*args) for ledger in self.ledgers)
        assert (fast if event != "hit_refusal" or fast is None else fast.cause) == slow, event
        return fast


LAWFUL = (
    *(BothLedgers.admit, BothLedgers.extend, BothLedgers.slide, BothLedgers.publish, BothLedgers.finish),
    *(BothLedgers.release_held, BothLedgers.step),
)
FAULTS = (
    *(BothLedgers.fault_free_a_live_page, BothLedgers.fault_give_a_page_to_another),
    *(BothLedgers.fault_queue, BothLedgers.fault_allocate_what_is_owned),
)
NEED_NOBODY = (BothLedgers.admit, BothLedgers.release_held, BothLedgers.step)
NUMBER = st.integers(0, 23)


def lives(*events: Any) -> st.SearchStrategy[list[tuple[Any, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(events), NUMBER, NUMBER), min_size=12, max_size=60)


def run(life: list[tuple[Any, int, int]]) -> BothLedgers:
    both = BothLedgers()
    for event, n, m in life:
        if both.pool.tables or event in NEED_NOBODY:
            event(both, n, m)
            both.know_the_same()
    both.step(0, 0)
    return both


@pytest.mark.timeout(90)
@settings(max_examples=150)
@given(lives(*LAWFUL))
def test_lawful_lives_flag_nobody_and_leave_nothing(life: list[tuple[Any, int, int]]) -> None:
    both = run(life)
    for request_id in list(both.pool.tables):
        both.pool.finish(request_id)
    both.pool.release_held()
    both.step(0, 0)

    assert both.fast.rows == 0
    assert sorted(both.pool.queue) == list(range(1, PAGES))


@pytest.mark.timeout(90)
@settings(max_examples=250)
@given(lives(*LAWFUL, *FAULTS))
def test_faulty_lives_are_flagged_as_the_slow_ledger_flags_them(life: list[tuple[Any, int, int]]) -> None:
    run(life)
