"""Three of the cells on the embedded model: a real text model, in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cell_checks import has_landed, is_calm, is_seen
from tests.support.cell_process import CellPair
from tests.support.page_cells import CELLS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CHOSEN = {cell.id: cell for cell in CELLS}


@pytest.fixture(scope="module")
def pair(model_dir: Path) -> Iterator[CellPair]:
    pair = CellPair(str(model_dir))
    yield pair
    pair.close()


@pytest.mark.parametrize("name", ["flip_last-decode", "free_live-decode", "corrupt_payload-receive"])
def test_a_fault_is_seen_with_integrity_and_lands_without(pair: CellPair, name: str) -> None:
    cell = CHOSEN[name]
    calm = pair.calm(cell.calm)
    is_calm(calm.checked)
    assert calm.checked.answers == calm.unchecked.answers
    spoiled = pair.play(cell.scene)

    is_seen(cell, calm.checked, spoiled.checked)
    has_landed(cell, calm.unchecked, spoiled.unchecked)
