"""From what was found in a row to the reason why."""

from collections.abc import Callable, Sequence
from typing import Final

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.tags import NO_TAG
from kv_transfer.integrity.verify import NULL_PAGE, Finding

NOWHERE: Final = PageFault(IntegrityCause.SHIFTED, -1, NO_TAG, NO_TAG)
"""The request itself was not where it should be."""


def explain(  # noqa: PLR0917
    finding: Finding,
    where: int,
    page: int,
    given: Sequence[int],
    tags: Sequence[int],
    block_size: int,
    tag_of: Callable[[int], int | None],
) -> PageFault:
    """
    Args:
        finding, where, page: as in `verify`.
        given: pages of the request's row in logical order, the null page, or -1, where attention never looks.
        tags: under which they were given.
        tag_of: a page's tag now; None for what is no page.
    """
    if finding in (Finding.LENGTH, Finding.POISONED):
        return NOWHERE
    index = where if finding is Finding.READ else where // block_size
    known = index < len(given)
    expected = int(tags[index]) if known else NO_TAG
    now = tag_of(page)
    found = NO_TAG if now is None else now
    if finding is Finding.WRITE:
        cause = IntegrityCause.UNEXPECTED_WRITE
    elif known and page == given[index] and page > NULL_PAGE:
        # The right page, and not what it was: its writer never wrote it, or it changed hands.
        cause = IntegrityCause.STALE_PREFIX if found == NO_TAG else IntegrityCause.REALLOCATED
    elif page == NULL_PAGE or now is None:
        cause = IntegrityCause.FREED
    else:
        cause = IntegrityCause.SHIFTED if page in given else IntegrityCause.REALLOCATED
    return PageFault(cause, page, expected, found)
