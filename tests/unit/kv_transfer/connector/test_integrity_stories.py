"""Nobody is answered from a page that does not hold its text, whatever comes between a fault and its end.

Random lives on vLLM's schedulers, in a small pool, with equal prompts, prompts in pieces, preemptions, aborts
and faults one after another; a slow witness (`page_witness`) says what each page really holds. Whoever read
something else ends with an integrity error, or computes anew and answers right; nobody else ends; all pages
come back; and with nothing under way each hash leads to what was hashed.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from kv_transfer.connector.guard import Guard
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.parted import NOTHING
from tests.support.page_story import Teller, a_story, story_of
from tests.support.page_witness import WitnessedEngine
from tests.support.toy_engine import connected_config

Engines = Callable[..., WitnessedEngine]
PLACES = pytest.mark.parametrize(
    ("ahead", "on_device"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["one step", "two steps in flight", "on a device", "on a device, two steps in flight"],
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return connected_config(tmp_path_factory.mktemp("engine"), integrity=True, max_num_batched_tokens=96)


@pytest.fixture
def engine_of(config: Any) -> Iterator[Engines]:
    made: list[WitnessedEngine] = []

    def make(*, ahead: bool, on_device: bool) -> WitnessedEngine:
        made.append(WitnessedEngine(config, 14, ahead=ahead, on_device=on_device))
        return made[0]

    yield make
    for engine in made:
        engine.close()


def play(engine: WitnessedEngine, seeds: Iterable[int], acts: int) -> None:
    for seed in seeds:
        engine.begin_anew()
        try:
            Teller(engine, seed).play(a_story(seed, acts))
        except AssertionError as error:
            raise AssertionError(f"story {seed} of {acts} acts: {error}") from error


@pytest.mark.timeout(60)
@PLACES
def test_who_reads_what_is_not_its_text_ends_and_nobody_else_does(
    engine_of: Engines, ahead: bool, on_device: bool
) -> None:
    engine = engine_of(ahead=ahead, on_device=on_device)

    play(engine, range(15), 30)

    assert engine.landed >= 30


STORIES = {
    # Two are taken out of a step while it is put together, and in the next one, before they end, somebody
    # finds by its hash a page that they were to write.
    "found between": story_of(
        "add 195380, fly 771205, free 315066, add 14142, fly 751613, twins 18911, add 861824, add 991366, "
        "give 340311, add 287009, land 704513, land 70262, twins 497276, fly 141634"
    ),
    # A page is given to another in the step in which the one that has lost it hashes it: vLLM itself dies.
    "lost and hashed": story_of("add 1032882, fly 1038305, twins 286663, add 176857, fly 2699, free 348803"),
    # The same, and the hash stays: whoever comes later finds by it a page with another text.
    "lost and found": story_of(
        "add 158401, flip 150464, twins 179718, abort 588690, add 452410, add 235419, fly 475720, land "
        "139204, flip 664283, add 534615, add 171416, add 438646, fly 59624, land 755207, add 400957, fly "
        "180709, add 529786, add 651312, abort 273276, land 93397, preempt 719656, free 541791"
    ),
    # A page that nobody wrote holds, from an earlier life, the text that is called for: luck, and no right.
    "forgiven": a_story(22, 50),
    # One reads a flagged request's page in a step that is under way: what it wrote before that step is right,
    # and whoever reads that is none of those to end.
    "right before": story_of(
        "add 392774, fly 554944, twins 432475, flip 953546, land 414444, add 391631, fly 1010627, land "
        "340859, add 1021360, write 297825, preempt 972050"
    ),
    # One is given a flagged request's page after the step in which it was flagged, in which it wrote rightly.
    "given later": story_of(
        "twins 73213, shift 102227, fly 364715, add 269748, fly 55217, twins 74965, twins 559554, land "
        "173753, abort 186858, flip 820761, fly 41117, give 209872"
    ),
    # A flagged request has lost a page: one that had it before that request was given it read nothing of it.
    "lost before": story_of(
        "add 708460, add 104384, flip 970986, fly 118656, fly 94077, add 918879, write 720486, twins "
        "200542, land 514217, land 666467, preempt 646558, free 279714"
    ),
    # A page is given again to one that hashes it, and never writes to it: the hash would stay.
    "given and hashed": story_of(
        "add 704716, add 321096, add 295181, add 794774, twins 596703, add 120159, fly 895435, fly 994794, "
        "flip 960022, land 563701, add 726629, fly 290330, land 511493, land 528538, abort 710156, free "
        "600695, add 818022, free 464728, give 159231, fly 300108, add 213094, land 137138, give 361851"
    ),
    # A flagged request is scheduled once more before it ends, and hashes the page that was given again to it.
    "hashed on": story_of(
        "add 638811, fly 243950, give 326014, land 797762, twins 1031992, fly 905229, abort 622830"
    ),
    # A page is freed that an aborted request still has until its step has ended: it is not given back twice.
    "lost while waiting": story_of(
        "add 356046, add 1026264, abort 676380, fly 447479, free 853496, twins 926171, add 90391, fly "
        "811925, add 210352, add 884221, abort 65155, free 421706"
    ),
}
"""That once ended wrongly."""


@pytest.mark.timeout(60)
@PLACES
@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories_that_once_ended_wrongly(
    engine_of: Engines, ahead: bool, on_device: bool, story: list[tuple[str, int]]
) -> None:
    engine = engine_of(ahead=ahead, on_device=on_device)
    engine.begin_anew()

    Teller(engine).play(story)


@pytest.mark.long
@pytest.mark.timeout(1200)
@PLACES
def test_thousands_of_stories(engine_of: Engines, ahead: bool, on_device: bool) -> None:
    engine = engine_of(ahead=ahead, on_device=on_device)

    for acts in (20, 50, 120):
        play(engine, range(100_000, 100_000 + 30_000 // acts), acts)

    assert engine.landed >= 5000


class Nobody(set[str]):
    def __contains__(self, name: object) -> bool:
        return False


def without_the_drop_at_release(engine: WitnessedEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.scheduler.kv_cache_manager, "condemned", Nobody())


def without_recall(engine: WitnessedEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guard, "_recall", lambda *_: NOTHING)


def without_the_end_of_readers(engine: WitnessedEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Guard, "_misled", lambda *_: {})


def without_authors_of_freed_pages(engine: WitnessedEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GenerationLedger, "author", GenerationLedger.writer)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "protection",
    [
        without_the_drop_at_release,
        without_recall,
        without_the_end_of_readers,
        without_authors_of_freed_pages,
    ],
)
def test_the_witness_sees_each_protection_that_is_off(
    engine_of: Engines,
    monkeypatch: pytest.MonkeyPatch,
    protection: Callable[[WitnessedEngine, pytest.MonkeyPatch], None],
) -> None:
    engine = engine_of(ahead=True, on_device=True)
    protection(engine, monkeypatch)

    with pytest.raises(AssertionError, match=r"not its text|promises another text"):
        play(engine, range(20), 50)
