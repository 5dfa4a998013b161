"""The table of page faults in the document is that of the tests."""

from pathlib import Path

import pytest

from kv_transfer.api.faults import FaultPhase, PageFaultKind
from tests.support.cell_table import REASONS, table
from tests.support.page_cells import CELLS

DOCUMENT = Path(__file__).parents[2] / "docs/integrity.md"


def test_the_document_has_the_table_of_the_cells() -> None:
    assert table() in DOCUMENT.read_text()


@pytest.mark.parametrize("kind", PageFaultKind)
@pytest.mark.parametrize("phase", FaultPhase)
def test_every_cell_is_played_once_or_has_its_reason(kind: PageFaultKind, phase: FaultPhase) -> None:
    played = [cell for cell in CELLS if (cell.kind, cell.phase) == (kind, phase)]

    assert len(played) + ((kind, phase) in REASONS) == 1
