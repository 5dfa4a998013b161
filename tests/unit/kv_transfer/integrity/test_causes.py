"""From what was found in a row to the reason why."""

import pytest

from kv_transfer.api.integrity import IntegrityCause as Cause
from kv_transfer.api.integrity import PageFault
from kv_transfer.integrity.causes import NOWHERE, explain
from kv_transfer.integrity.verify import Finding

GIVEN, TAGS = [0, 3, 4], [0, 103, 104]
"""The first page fell out of the window."""
NOW = {0: 1, 3: 103, 4: 0, 5: 105}
"""Page 4 was never written; 6 is no page."""


@pytest.mark.parametrize(
    ("finding", "where", "page", "fault"),
    [
        (Finding.READ, 1, 5, PageFault(Cause.REALLOCATED, 5, 103, 105)),
        (Finding.READ, 1, 4, PageFault(Cause.SHIFTED, 4, 103, 0)),
        (Finding.READ, 2, 4, PageFault(Cause.STALE_PREFIX, 4, 104, 0)),
        (Finding.READ, 1, 0, PageFault(Cause.FREED, 0, 103, 1)),
        (Finding.READ, 0, 0, PageFault(Cause.FREED, 0, 0, 1)),
        (Finding.READ, 1, 6, PageFault(Cause.FREED, 6, 103, 0)),
        (Finding.READ, 7, 5, PageFault(Cause.REALLOCATED, 5, 0, 105)),
        (Finding.WRITE, 9, 5, PageFault(Cause.UNEXPECTED_WRITE, 5, 104, 105)),
        (Finding.LENGTH, 9, -1, NOWHERE),
        (Finding.POISONED, 0, 0, NOWHERE),
    ],
)
def test_what_was_found_has_its_cause(finding: Finding, where: int, page: int, fault: PageFault) -> None:
    assert explain(finding, where, page, GIVEN, TAGS, 4, NOW.get) == fault
