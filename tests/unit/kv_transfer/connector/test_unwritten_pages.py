"""Pages get their hashes while a step is put together, before the forward that fills them.

So whoever is taken out of a step, or masked in it, leaves hashes behind that promise what was never written.
Nobody may read it: neither those who found it in the same step, nor those who come later.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kv_transfer.api.integrity import IntegrityCause as Cause
from kv_transfer.api.integrity import PageFault
from kv_transfer.connector.scheduler import PhasegateAsyncScheduler, PhasegateScheduler
from kv_transfer.integrity.verify import Tables
from tests.support.toy_engine import ToyEngine, connected_config, right_answer
from tests.support.twice import first_page_given_again

Engines = Callable[..., ToyEngine]
PROMPT = [8] * 70
"""Two whole pages and a piece."""
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["one step", "two steps in flight"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return connected_config(tmp_path_factory.mktemp("engine"), integrity=True)


@pytest.fixture
def engine_of(config: Any) -> Iterator[Engines]:
    made: list[ToyEngine] = []

    def make(*, ahead: bool, on_device: bool = False) -> ToyEngine:
        kind = PhasegateAsyncScheduler if ahead else PhasegateScheduler
        made.append(ToyEngine(config, 40, kind, in_flight=2 if ahead else 1, on_device=on_device))
        made[0].content[:] = 77  # of whoever had the pages before
        return made[0]

    yield make
    for engine in made:
        engine.close()


def causes(engine: ToyEngine) -> dict[str, Cause]:
    faults = {name: PageFault.from_params(answer.params) for name, answer in engine.answers.items()}
    return {name: fault.cause for name, fault in faults.items() if fault is not None}


def answers_right(engine: ToyEngine, name: str) -> bool:
    return engine.answers[name].reason == "length" and engine.answers[name].tokens == right_answer(PROMPT, 12)


@pytest.mark.timeout(60)
@AHEAD
def test_who_found_pages_of_one_that_is_taken_out_of_the_same_step_ends_too(
    engine_of: Engines, ahead: bool
) -> None:
    """The last page of `one` is given to `third` as well; `two` has the same prompt as `one`."""
    engine = engine_of(ahead=ahead)
    for name, prompt in (("one", PROMPT), ("two", PROMPT), ("third", [6] * 20)):
        engine.add(name, prompt, salt="s")
    with first_page_given_again(engine.pool, at=3):
        engine.step()
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    assert causes(engine) == {
        "one": Cause.DOUBLE_ASSIGNED,
        "third": Cause.DOUBLE_ASSIGNED,
        "two": Cause.STALE_PREFIX,
    }
    assert engine.guard.mismatches() == {Cause.DOUBLE_ASSIGNED: 2, Cause.STALE_PREFIX: 1}
    assert answers_right(engine, "after")
    engine.balanced()


def wrong_entry(engine: ToyEngine, step: Any, tables: Tables) -> None:
    """Once, in the prompt of `one`: a page that nobody has."""
    if "one" in engine.keeper.plan:
        tables.block_table[list(engine.keeper.plan).index("one"), 0] = 39
        engine.mischief = None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("how", "ahead"),
    [("aborted", False), ("aborted", True), ("preempted", True)],
    ids=["aborted", "aborted, two steps in flight", "preempted, two steps in flight"],
)
def test_what_a_flagged_request_did_not_write_is_not_found_though_it_had_gone_before_that_was_known(
    engine_of: Engines, ahead: bool, on_device: bool, how: str
) -> None:
    """It goes between the step's forward and what is told of it, as vLLM lets it."""
    engine = engine_of(ahead=ahead, on_device=on_device)
    if ahead:  # a step that is taken in between the end of `one` and what is told of it
        engine.add("early", [3] * 20)
        engine.step()
    engine.mischief = wrong_entry
    engine.add("one", PROMPT, salt="s")
    step = engine.scheduler.schedule()
    engine._flying.append((step, engine._compute(step)))
    assert engine.mischief is None
    if how == "aborted":
        engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    else:
        one = engine.scheduler.requests["one"]
        engine.scheduler.running.remove(one)
        engine.scheduler._preempt_request(one, 0.0)
    if ahead:  # finds the pages before the step is taken in
        engine.add("quick", PROMPT, salt="s")
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    ended = {"quick": Cause.STALE_PREFIX} if ahead else {}
    assert causes(engine) == ended | ({"one": Cause.FREED} if how == "preempted" else {})
    assert engine.guard.mismatches() == {Cause.FREED: 1} | dict.fromkeys(ended.values(), 1)
    assert answers_right(engine, "after")
    engine.balanced()


@pytest.mark.timeout(60)
@AHEAD
def test_pages_of_one_that_was_right_are_found_after_an_abort(engine_of: Engines, ahead: bool) -> None:
    engine = engine_of(ahead=ahead)
    engine.add("one", PROMPT, salt="s")
    step = engine.scheduler.schedule()
    engine._flying.append((step, engine._compute(step)))
    engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.step()

    assert engine.keeper.plan["after"][0] == 64
    engine.run()
    assert not engine.guard.mismatches()
    assert answers_right(engine, "after")
    engine.balanced()
