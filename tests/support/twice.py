"""A pool of vLLM's that gives a page out which somebody has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def given_again(
    pool: Any, which: Callable[[list[Any]], Any | None], *, counted: bool = True
) -> Iterator[None]:
    """In here the page that `which` names takes the place of the last one of a call's answer.

    Args:
        which: is shown each answer; None: it stays as it is.
        counted: whether the page knows that one more has it.
    """
    right = type(pool).get_new_blocks

    def get_new_blocks(count: int) -> list[Any]:
        blocks: list[Any] = right(pool, count)
        if (again := which(blocks)) is not None:
            instead, blocks[-1] = blocks[-1], again
            again.ref_cnt += counted
            instead.ref_cnt = 0
            pool.free_block_queue.append_n([instead])
        return blocks

    pool.get_new_blocks = get_new_blocks
    try:
        yield
    finally:
        del pool.get_new_blocks


@contextmanager
def first_page_given_again(pool: Any, *, at: int, counted: bool = True) -> Iterator[None]:
    """In here the last page of the first call takes the place of the last one of the `at`th call."""
    given: list[Any] = []

    def first(blocks: list[Any]) -> Any | None:
        given.append(blocks[-1])
        return given[0] if len(given) == at else None

    with given_again(pool, first, counted=counted):
        yield
