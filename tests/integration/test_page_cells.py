"""Every fault in every phase, on a real engine: the table in `docs/integrity.md`."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.support.cell_checks import IN_TRANSFER, has_landed, is_calm, is_seen
from tests.support.cell_process import CellPair
from tests.support.cell_words import PAGE, Ask, Scene
from tests.support.page_cells import CELLS, Cell, text

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair() -> Iterator[CellPair]:
    pair = CellPair()
    yield pair
    pair.close()


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_a_fault_is_seen_with_integrity_and_lands_without(pair: CellPair, cell: Cell) -> None:
    calm = pair.calm(cell.calm)
    is_calm(calm.checked)
    assert calm.checked.answers == calm.unchecked.answers
    assert cell.phase in IN_TRANSFER or calm.checked.steps == calm.unchecked.steps
    spoiled = pair.play(cell.scene)

    is_seen(cell, calm.checked, spoiled.checked)
    has_landed(cell, calm.unchecked, spoiled.unchecked)


def test_a_wrong_read_that_leaves_the_tokens_as_they_were_is_seen_all_the_same(pair: CellPair) -> None:
    """Comparing answers would have missed it: only log-probs move where nothing is checked."""
    for after in range(101, 80, -1):  # the later, the fewer tokens that could change
        cell = replace(next(c for c in CELLS if c.id == "flip_last-decode"), after_tokens=after)
        calm, spoiled = pair.calm(cell.calm), pair.play(cell.scene)
        is_seen(cell, calm.checked, spoiled.checked)
        right, wrong = calm.unchecked.answers["a"], spoiled.unchecked.answers["a"]
        if wrong.tokens == right.tokens:
            assert wrong.logprobs != right.logprobs
            return
    pytest.fail("every flip changed a token")


def test_equal_prompts_whole_pages_and_a_late_hit_raise_nothing(pair: CellPair) -> None:
    same, whole = text(70, 8), text(3 * PAGE, 9)
    scene = Scene(
        asks=(
            *(Ask(name=name, prompt=same, salt="s") for name in ("one", "two")),
            Ask(name="whole", prompt=whole, salt="s"),
            Ask(name="again", prompt=same, salt="s", after="two"),
            Ask(name="more", prompt=(*whole, 5), salt="s", after="again"),
        )
    )
    played = pair.calm(scene)
    is_calm(played.checked)

    answers = played.checked.answers
    assert answers["one"].tokens == answers["two"].tokens == answers["again"].tokens
    first = {name: next(s[name] for s in played.checked.steps if name in s) for name in answers}
    computed = {name: len(given.slots) for name, given in first.items()}
    assert computed == {"one": 70, "two": 6, "whole": 96, "again": 6, "more": 1}
    assert first["again"].pages[:2] == first["one"].pages[:2] == first["two"].pages[:2]
