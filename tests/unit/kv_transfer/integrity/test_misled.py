"""Who read what a flagged request did not write."""

import pytest

from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.misled import ALL, computed_before, to_write, was_to_write, who_read
from kv_transfer.integrity.parted import Parted
from tests.support.toy_pool import ToyPool

SIZE = 10
STEPS = {3: {"a": (0, 20), "b": (7, 1)}, 4: {"a": (20, 30)}, 5: {"b": (0, 5)}}


@pytest.fixture
def pool() -> ToyPool:
    return ToyPool(12, 1, [GenerationLedger(12, 1, free=range(1, 12))])


@pytest.mark.parametrize(
    ("name", "where", "last", "computed"),
    [
        ("a", 0, ALL, 0),
        ("a", 19, ALL, 0),
        ("a", 20, ALL, 20),
        ("a", 50, ALL, ALL),
        ("a", 20, 3, ALL),
        ("b", 0, ALL, 7),
        ("b", 0, 2, ALL),
        ("c", 0, ALL, ALL),
    ],
)
def test_what_a_request_had_before_the_first_step_that_reads_so_far(
    name: str, where: int, last: int, computed: int
) -> None:
    assert computed_before(name, STEPS, where, last) == computed


def test_a_request_was_to_write_its_own_pages_from_the_token_on_that_it_had(pool: ToyPool) -> None:
    pool.admit("a", 1, 3)
    (ledger,), (table,) = pool.ledgers, pool.tables["a"]

    assert to_write(ledger, "a", [SIZE], 0) == set(table)
    assert to_write(ledger, "a", [SIZE], SIZE - 1) == set(table)
    assert to_write(ledger, "a", [SIZE], 2 * SIZE) == {table[2]}
    assert to_write(ledger, "a", [SIZE], ALL) == set()


def test_what_was_given_back_counts_until_another_writes_to_it(pool: ToyPool) -> None:
    pool.admit("a", 1, 3)
    (ledger,), (table,), parted = pool.ledgers, pool.tables["a"], Parted()
    parted.add("a", [ledger.row("a", 0)], [[None, *table[1:]]], told=False)
    gone = parted.take("a")
    pool.finish("a")
    assert was_to_write(ledger, "a", [SIZE], 0, gone) == set(table[1:])
    assert was_to_write(ledger, "a", [SIZE], 2 * SIZE, gone) == {table[2]}

    pool.queue.remove(table[1])
    pool.queue.appendleft(table[1])
    pool.admit("b", 1, 1)

    assert was_to_write(ledger, "a", [SIZE], 0, gone) == {table[2]}


@pytest.mark.parametrize("freed", [False, True])
def test_readers_are_those_who_have_the_page_and_those_who_had_it_since_it_was_given(
    pool: ToyPool, freed: bool
) -> None:
    """A page that was freed since has another tag: who was given it before that has read it all the same."""
    pool.admit("a", 1, 2)
    (ledger,), (table,), parted = pool.ledgers, pool.tables["a"], Parted()
    page, tag = table[1], ledger.tag(table[1])
    parted.add("before", [[(1, 5), (page, tag - 1)]], [[None, None]], told=False)
    parted.add("since", [[(1, 5), (page, tag)]], [[None, None]], told=False)
    if freed:
        pool.free(page)
    else:
        pool.touch(page)
        pool.tell("serve", "has", 1)
        pool.tell("touched", page)
        pool.tell("grow", "has", [[page]])
        pool.tell("serve_nobody")

    readers = who_read(ledger, parted, "a", [SIZE], [page])

    found = {name: (fault.page, fault.expected, where) for name, (fault, where) in readers.items()}
    assert found == {"since": (page, tag, SIZE)} | ({} if freed else {"has": (page, tag, 0)})
