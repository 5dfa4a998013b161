"""A pool of vLLM's that gives a page out which somebody has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_page_given_again(pool: Any, *, at: int, counted: bool = True) -> Iterator[None]:
    """In here the `at`th call is answered with the last page of the first one, instead of its own last one.

    Args:
        counted: whether the page knows that one more has it.
    """
    right = type(pool).get_new_blocks
    given: list[Any] = []

    def get_new_blocks(count: int) -> list[Any]:
        blocks: list[Any] = right(pool, count)
        given.append(blocks[-1])
        if len(given) == at:
            instead, blocks[-1] = blocks[-1], given[0]
            given[0].ref_cnt += counted
            instead.ref_cnt = 0
            pool.free_block_queue.append_n([instead])
        return blocks

    pool.get_new_blocks = get_new_blocks
    try:
        yield
    finally:
        del pool.get_new_blocks
