"""The ledger by example: a request, its pages, and what must be noticed."""

from collections import Counter

import pytest

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.base import CHECKS, NullLedger
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.tags import NO_DOMAIN, tag_domain
from tests.support.toy_pool import ToyPool

PAGES = 12
FREED, REALLOCATED = IntegrityCause.FREED, IntegrityCause.REALLOCATED
DOUBLE = IntegrityCause.DOUBLE_ASSIGNED
A, B = 1, 2
"""Domains."""


class Bench:
    """One ledger under a toy pool."""

    def __init__(self, groups: int = 1) -> None:
        self.ledger = GenerationLedger(PAGES, groups, free=range(1, PAGES))
        self.pool = ToyPool(PAGES, groups, [self.ledger])

    def page(self, request_id: str, index: int, group: int = 0) -> int:
        return self.pool.tables[request_id][group][index]

    def step(self) -> dict[str, PageFault]:
        self.ledger.reconcile(self.pool.references.__getitem__, lambda: self.pool.held)
        return self.ledger.take_flagged()

    def causes(self) -> dict[str, IntegrityCause]:
        return {request_id: fault.cause for request_id, fault in self.step().items()}


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_page_has_a_new_tag_after_each_allocation_and_each_release(bench: Bench) -> None:
    tags = [bench.ledger.tag(1)]
    for domain in (A, B):
        bench.pool.queue.appendleft(1)
        bench.pool.queue.remove(1)
        bench.pool.admit(f"r{domain}", domain, 1)
        page = bench.page(f"r{domain}", 0)
        tags.append(bench.ledger.tag(page))
        assert tag_domain(tags[-1]) == domain
        bench.pool.finish(f"r{domain}")
        bench.pool.queue.rotate(1)
        tags.append(bench.ledger.tag(page))

    assert tags == sorted(set(tags))


def test_the_life_of_requests_flags_nobody_and_leaves_nothing(bench: Bench) -> None:
    pool = bench.pool
    pool.admit("a", A, 3)
    pool.publish("a", 0)
    pool.admit("hit", A, 1)
    pool.extend("hit", 2)
    assert pool.tables["hit"][0][0] == pool.tables["a"][0][0]
    assert bench.causes() == {}
    pool.finish("a")
    pool.finish("hit", hold=True)
    assert bench.causes() == {}
    pool.release_held()
    assert bench.causes() == {}

    assert bench.ledger.rows == 0
    assert not any(bench.ledger.owners(page) for page in range(PAGES))
    assert sum(map(bench.ledger.is_free, range(PAGES))) == PAGES - 1


def test_a_page_freed_under_its_owner_ends_the_owner_with_the_tags_that_tell_why(bench: Bench) -> None:
    bench.pool.admit("a", A, 2)
    page = bench.page("a", 1)
    before = bench.ledger.tag(page)

    bench.pool.free(page)

    assert bench.step() == {"a": PageFault(FREED, page, before, bench.ledger.tag(page))}


def test_a_page_freed_and_given_to_another_ends_its_old_owner_alone(bench: Bench) -> None:
    bench.pool.admit("a", A, 2)
    bench.pool.free(bench.page("a", 1))
    bench.pool.queue.rotate(1)
    bench.pool.admit("b", B, 1)
    assert bench.page("b", 0) == bench.page("a", 1)

    assert bench.causes() == {"a": REALLOCATED}

    bench.pool.finish("a")
    assert bench.pool.references[bench.page("b", 0)] == 1
    bench.pool.finish("b")
    assert bench.causes() == {}
    assert sorted(bench.pool.queue) == list(range(1, PAGES))


@pytest.mark.parametrize("counted", [False, True], ids=["reference forgotten", "reference counted"])
def test_a_page_given_to_two_requests_in_one_step_ends_both(bench: Bench, counted: bool) -> None:
    bench.pool.admit("a", A, 1)
    page = bench.page("a", 0)
    bench.pool.references[page] += counted
    bench.pool.tables["b"] = [[page]]
    bench.ledger.serve("b", B)
    bench.ledger.grow("b", [[page]])

    assert bench.causes() == {"a": DOUBLE, "b": DOUBLE}

    bench.pool.finish("a")
    bench.pool.finish("b")
    assert bench.pool.references[page] == 0
    assert sorted(bench.pool.queue) == list(range(1, PAGES))


def test_a_page_given_out_as_new_while_its_content_may_be_shared_ends_both(bench: Bench) -> None:
    """References add up, and it has a hash, so that it may have readers: but nobody found it by that."""
    bench.pool.admit("a", A, 1)
    bench.pool.publish("a", 0)
    page = bench.page("a", 0)
    bench.pool.references[page] += 1
    bench.pool.tables["b"] = [[page]]
    bench.ledger.serve("b", A)
    bench.ledger.grow("b", [[page]])

    assert bench.causes() == {"a": DOUBLE, "b": DOUBLE}


def test_what_the_last_request_found_by_content_is_not_found_for_the_next(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)
    bench.pool.publish("a", 0)
    bench.pool.admit("hit", A, 1)
    page = bench.page("a", 0)
    assert bench.page("hit", 0) == page
    assert bench.causes() == {}

    bench.pool.references[page] += 1
    bench.pool.tables["b"] = [[page]]
    bench.ledger.serve("b", A)
    bench.ledger.grow("b", [[page]])

    assert bench.causes() == {"a": DOUBLE, "hit": DOUBLE, "b": DOUBLE}


def test_a_page_allocated_while_it_is_owned_ends_its_owner(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)

    bench.ledger.allocated(bench.page("a", 0))

    assert bench.causes() == {"a": DOUBLE}


def test_a_page_twice_in_one_table_ends_its_request(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)

    bench.ledger.grow("a", [[bench.page("a", 0)]])

    assert bench.causes() == {"a": DOUBLE}


def test_references_that_do_not_add_up_end_the_owners(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)
    bench.pool.references[bench.page("a", 0)] += 1

    assert bench.causes() == {"a": DOUBLE}


def test_a_reference_that_nobody_owns_is_counted(bench: Bench) -> None:
    page = bench.pool.allocate()

    assert bench.causes() == {}
    assert bench.ledger.counts == Counter({DOUBLE: 1})
    assert bench.ledger.owners(page) == frozenset()


def test_a_page_is_not_queued_twice_nor_while_it_is_referenced(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)

    assert not bench.ledger.queued(bench.page("a", 0), references=1)
    assert not bench.ledger.queued(bench.pool.queue[0], references=0)

    assert bench.causes() == {"a": FREED}
    assert bench.ledger.counts == Counter({FREED: 2})


def test_a_window_that_moves_on_gives_pages_back_and_flags_nobody() -> None:
    bench = Bench(groups=2)
    bench.pool.admit("a", A, 3)
    bench.ledger.take_delta()
    bench.pool.queue.clear()  # the pages that fall out of the window are all that there is
    bench.pool.slide("a", 1, 2, then_extend=1)

    assert bench.causes() == {}
    assert [page for page, _ in bench.ledger.row("a", 1)][:2] == [0, 0]
    delta = bench.ledger.take_delta()
    assert [(s.request_id, s.group, s.start, s.end) for s in delta.skipped] == [("a", 1, 0, 2)]
    assert {g.group: (g.start, g.own) for g in delta.grown} == {0: (3, [True]), 1: (3, [True])}


def test_a_hit_needs_the_page_as_it_was_hashed_and_the_same_domain(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)
    bench.pool.publish("a", 0)
    page, key = bench.page("a", 0), bench.pool.key_of(bench.page("a", 0))
    bench.ledger.serve("x", B)
    foreign = bench.ledger.hit_refusal(key, page)
    bench.ledger.serve_nobody()
    nobodys = bench.ledger.hit_refusal(key, page)
    bench.ledger.serve("y", A)
    right = bench.ledger.hit_refusal(key, page)
    bench.pool.finish("a")
    cached = bench.ledger.hit_refusal(key, page)
    bench.ledger.taken(page)
    bench.ledger.allocated(page)
    stale = bench.ledger.hit_refusal(key, page)

    assert right is None
    assert cached is None, "freeing a page leaves its content"
    assert [f.cause for f in (foreign, nobodys, stale) if f] == [
        IntegrityCause.FOREIGN_DOMAIN,
        IntegrityCause.FOREIGN_DOMAIN,
        IntegrityCause.STALE_PREFIX,
    ]


def test_only_the_request_that_a_page_was_allocated_for_writes_to_it(bench: Bench) -> None:
    bench.pool.admit("a", A, 2)
    bench.pool.publish("a", 0)
    bench.pool.admit("hit", A, 1)

    own = {g.request_id: g.own for g in bench.ledger.take_delta().grown}

    assert own == {"a": [True, True], "hit": [False, True]}
    assert bench.ledger.writer(bench.page("hit", 0)) == "a"


def test_a_step_costs_what_changed_in_it(bench: Bench) -> None:
    bench.pool.admit("a", A, 3)
    bench.step()
    bench.ledger.take_delta()
    asked: list[int] = []

    def references(page: int) -> int:
        asked.append(page)
        return bench.pool.references[page]

    bench.ledger.reconcile(references, Counter)
    assert asked == []
    assert bench.ledger.take_delta() == LedgerDelta()
    bench.pool.extend("a", 1)
    bench.ledger.reconcile(references, Counter)
    assert asked == [bench.page("a", 3)]
    assert list(bench.ledger.take_delta().tags) == [bench.page("a", 3)]


def test_a_request_that_comes_and_goes_within_a_step_is_not_told(bench: Bench) -> None:
    bench.ledger.take_delta()
    bench.pool.admit("a", A, 1)
    bench.pool.finish("a")

    delta = bench.ledger.take_delta()

    assert (delta.dropped, delta.grown) == ([], [])


def test_the_null_ledger_knows_nothing_and_says_that_nothing_is_checked() -> None:
    ledger = NullLedger()

    assert ledger.counts == Counter()
    assert ledger.tags([0, 1]) == ()
    assert ledger.coverage().checked == ()
    assert ledger.coverage().unchecked == CHECKS
    assert len(GenerationLedger(2, 1, free=[1]).tags([0, 1])) == 2
    assert GenerationLedger(2, 1, free=[1]).coverage().checked == CHECKS


def test_a_page_with_a_hash_that_is_given_out_as_new_is_double_assigned(bench: Bench) -> None:
    """Its references add up, and shared pages have hashes: only nobody has found it by its content."""
    bench.pool.admit("a", A, 2)
    bench.pool.publish("a", 0)
    page = bench.page("a", 0)
    assert bench.step() == {}

    bench.ledger.serve("b", A)
    bench.pool.references[page] += 1
    bench.pool.tables["b"] = [[page]]
    bench.ledger.grow("b", [[page]])
    bench.ledger.serve_nobody()

    assert bench.causes() == {"a": DOUBLE, "b": DOUBLE}


def test_a_page_without_a_hash_has_no_second_owner(bench: Bench) -> None:
    """Also where it was taken as if it had been found, and its references add up."""
    bench.pool.admit("a", A, 1)
    page = bench.page("a", 0)
    assert bench.step() == {}

    bench.ledger.serve("b", A)
    bench.ledger.touched(page)
    bench.pool.references[page] += 1
    bench.ledger.grow("b", [[page]])
    bench.ledger.serve_nobody()

    assert bench.causes() == {"a": DOUBLE, "b": DOUBLE}


def test_a_page_is_fresh_until_its_step_is_sent_or_it_is_given_back(bench: Bench) -> None:
    bench.pool.admit("a", A, 2)
    pages = [bench.page("a", index) for index in (0, 1)]
    assert all(map(bench.ledger.is_fresh, pages))

    bench.step()
    bench.ledger.take_delta()
    assert not any(map(bench.ledger.is_fresh, pages))

    bench.pool.admit("b", B, 1)
    page = bench.page("b", 0)
    bench.pool.finish("b")
    assert not bench.ledger.is_fresh(page)


def test_tags_under_which_a_request_was_given_its_pages_outlive_the_pages(bench: Bench) -> None:
    bench.pool.admit("a", A, 2)
    pages = [bench.page("a", index) for index in (0, 1)]
    given = bench.ledger.given("a", pages)
    assert given == bench.ledger.tags(pages)

    bench.pool.free(pages[1])

    assert bench.ledger.given("a", pages) == given != bench.ledger.tags(pages)
    assert bench.ledger.given("a", pages[:1]) == given[:1]
    assert bench.ledger.given("unknown", pages) == ()


def test_whoever_gets_a_page_that_was_freed_too_early_is_not_to_blame(bench: Bench) -> None:
    """`a` has ended and holds its pages for a transfer: nothing takes them from it when it is flagged."""
    bench.pool.admit("a", A, 1)
    page = bench.page("a", 0)
    bench.step()
    bench.pool.free(page)
    assert bench.causes() == {"a": FREED}

    bench.pool.queue.remove(page)
    bench.pool.queue.appendleft(page)
    bench.pool.admit("b", B, 1)

    assert bench.page("b", 0) == page
    assert bench.step() == {}
    assert bench.ledger.owners(page) == {"b"}
    assert bench.ledger.lost("a", [[page]], bench.pool.references.__getitem__) == [(0, 0)]


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_page_that_was_queued_while_somebody_had_it_goes_back_with_the_last_one_it_was_given_to(
    bench: Bench, first: str
) -> None:
    bench.pool.admit("a", A, 1)
    page = bench.page("a", 0)
    bench.pool.references[page] = 0
    bench.pool.queue.appendleft(page)
    bench.pool.admit("b", B, 1)
    assert bench.causes() == {"a": DOUBLE, "b": DOUBLE}

    lost = {}
    for name in (first, "b" if first == "a" else "a"):
        lost[name] = bench.ledger.lost(name, [[page]], bench.pool.references.__getitem__)
        bench.ledger.drop(name)

    assert lost == {"a": [(0, 0)], "b": []}


def test_a_reference_for_its_content_that_nobody_took_ends_the_owners(bench: Bench) -> None:
    bench.pool.admit("a", A, 1)
    assert bench.step() == {}

    bench.pool.touch(bench.page("a", 0))

    assert bench.causes() == {"a": DOUBLE}


def test_a_hash_that_was_made_for_nobody_leads_nobody_to_its_page(bench: Bench) -> None:
    """Not those either who have no salt, and so no domain."""
    page = bench.pool.allocate()
    bench.ledger.bound("key", page)
    bench.ledger.serve("x", NO_DOMAIN)
    refused = bench.ledger.hit_refusal("key", page)

    assert refused is not None
    assert refused.cause is IntegrityCause.FOREIGN_DOMAIN


def test_the_null_page_in_a_table_is_nobodys(bench: Bench) -> None:
    page = bench.pool.allocate()
    bench.ledger.serve("a", A)
    bench.ledger.touched(page)
    bench.ledger.grow("a", [[0, 0]])

    assert bench.ledger.row("a", 0) == [(0, 0), (0, 0)]
    assert bench.ledger.owners(0) == frozenset()
    assert bench.ledger.take_flagged() == {}


def test_a_page_that_is_found_and_stays_in_the_queue_ends_its_finder(bench: Bench) -> None:
    """The pool would give it out once more."""
    bench.pool.admit("a", A, 1)
    bench.pool.publish("a", 0)
    page = bench.page("a", 0)
    bench.pool.finish("a")
    bench.ledger.serve("b", A)
    bench.ledger.touched(page)
    bench.pool.references[page] += 1
    bench.ledger.grow("b", [[page]])

    assert bench.causes() == {"b": FREED}


def test_what_is_no_page_has_no_tag(bench: Bench) -> None:
    """-1 and what follows the last page stand in tables that went wrong."""
    assert [bench.ledger.tag_if_page(page) for page in (-1, PAGES)] == [None, None]
    assert bench.ledger.tag_if_page(PAGES - 1) == bench.ledger.tag(PAGES - 1)
