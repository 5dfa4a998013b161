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
from tests.support.page_story import Teller, a_story
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


FOUND_BETWEEN = [
    *(("add", 195380), ("fly", 771205), ("free", 315066), ("add", 14142), ("fly", 751613), ("twins", 18911)),
    *(("add", 861824), ("add", 991366), ("give", 340311), ("add", 287009), ("land", 704513), ("land", 70262)),
    *(("twins", 497276), ("fly", 141634)),
]
"""Two are taken out of a step while it is put together, and in the next one, before they end, somebody finds
by its hash a page that they were to write."""


LOST_AND_HASHED = [
    *(
        ("add", 1032882),
        ("fly", 1038305),
        ("twins", 286663),
        ("add", 176857),
        ("fly", 2699),
        ("free", 348803),
    ),
]
"""A page is given to another in the step in which the one that has lost it hashes it: vLLM itself dies."""
LOST_AND_FOUND = [
    *(("add", 158401), ("flip", 150464), ("twins", 179718), ("abort", 588690), ("add", 452410)),
    *(("add", 235419), ("fly", 475720), ("land", 139204), ("flip", 664283), ("add", 534615), ("add", 171416)),
    *(("add", 438646), ("fly", 59624), ("land", 755207), ("add", 400957), ("fly", 180709), ("add", 529786)),
    *(("add", 651312), ("abort", 273276), ("land", 93397), ("preempt", 719656), ("free", 541791)),
]
"""The same, and the hash stays: whoever comes later finds by it a page with another text."""
FORGIVEN = a_story(22, 50)
"""A page that nobody wrote holds, from an earlier life, the text that is called for: luck, and no right."""


@pytest.mark.timeout(60)
@PLACES
@pytest.mark.parametrize("story", [FOUND_BETWEEN, LOST_AND_HASHED, LOST_AND_FOUND, FORGIVEN])
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
    patch.setattr(Guard, "_recall", lambda *_: {})


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
