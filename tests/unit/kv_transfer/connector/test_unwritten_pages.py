"""Pages get their hashes while a step is put together, before the forward that fills them.

So whoever is taken out of a step, or masked in it, leaves hashes behind that promise what was never written.
Nobody may read it: neither those who found it in the same step, nor those who come later.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kv_transfer.api.integrity import IntegrityCause as Cause
from kv_transfer.api.integrity import PageFault
from kv_transfer.connector.guard import orders_of
from kv_transfer.connector.scheduler import PhasegateAsyncScheduler, PhasegateScheduler
from kv_transfer.integrity.verify import Tables
from tests.support.toy_engine import Engines, ToyEngine, connected_config, right_answer
from tests.support.twice import first_page_given_again

PROMPT = [8] * 70
"""Two whole pages and a piece."""
ON_DEVICE = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
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


def preempt(engine: ToyEngine, name: str) -> None:
    request = engine.scheduler.requests[name]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)


@pytest.mark.timeout(60)
@ON_DEVICE
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
        preempt(engine, "one")
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


def fly(engine: ToyEngine) -> Any:
    """One step more is under way; what comes of it."""
    step = engine.scheduler.schedule()
    engine._flying.append((step, engine._compute(step)))
    return engine._flying[-1][1]


@pytest.mark.timeout(60)
@ON_DEVICE
def test_who_read_them_ends_though_it_was_preempted_before_that_was_known(
    engine_of: Engines, on_device: bool
) -> None:
    """vLLM delivers the token that was under way. `third` has found what `two` wrote after it had read."""
    engine = engine_of(ahead=True, on_device=on_device)
    engine.add("early", [3] * 20)
    engine.step()
    engine.mischief = wrong_entry
    for name, prompt in (("one", PROMPT[:33]), ("two", PROMPT), ("third", PROMPT)):
        engine.add(name, prompt, salt="s")
    fly(engine)
    assert engine.keeper.plan["two"][0] == 32
    assert engine.keeper.plan["third"][0] == 64
    preempt(engine, "two")
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    assert causes(engine) == {"one": Cause.FREED, "two": Cause.STALE_PREFIX, "third": Cause.STALE_PREFIX}
    assert engine.guard.mismatches() == {Cause.FREED: 1, Cause.STALE_PREFIX: 2}
    assert answers_right(engine, "after")
    engine.balanced()


@pytest.mark.timeout(60)
@ON_DEVICE
@pytest.mark.parametrize("aborted", [False, True], ids=["ends", "aborted"])
def test_who_read_them_ends_though_the_request_was_to_end_for_another_reason(
    engine_of: Engines, on_device: bool, aborted: bool
) -> None:
    """A page of `one` is freed under it: it is flagged while what it did not write is under way."""
    engine = engine_of(ahead=True, on_device=on_device)
    engine.mischief = wrong_entry
    for name in ("one", "two"):
        engine.add(name, PROMPT, salt="s")
    fly(engine)
    engine.pool.free_blocks([engine.scheduler.kv_cache_manager.coordinator.get_blocks("one")[0][2]])
    fly(engine)
    if aborted:
        engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    engine._take_in()
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    assert causes(engine) == {"two": Cause.STALE_PREFIX} | ({} if aborted else {"one": Cause.FREED})
    assert engine.guard.mismatches() == {Cause.FREED: 1, Cause.STALE_PREFIX: 1}
    assert answers_right(engine, "after")
    engine.balanced()


@pytest.mark.timeout(60)
@ON_DEVICE
@pytest.mark.parametrize(
    ("ahead", "reader"),
    [(False, ""), (True, ""), (True, "has it"), (True, "had it")],
    ids=["one step", "two steps in flight", "found meanwhile", "found, and given back"],
)
def test_nobody_reads_a_page_that_was_freed_under_one_that_was_masked_before(
    engine_of: Engines, ahead: bool, on_device: bool, reader: str
) -> None:
    """Its hash goes with it to the free ones, and still promises what was never written."""
    engine = engine_of(ahead=ahead, on_device=on_device)
    engine.mischief = wrong_entry
    engine.add("one", PROMPT, salt="s")
    fly(engine)
    assert engine.mischief is None
    engine.pool.free_blocks([engine.scheduler.kv_cache_manager.coordinator.get_blocks("one")[0][0]])
    if reader:
        engine.add("reader", PROMPT, salt="s")
        fly(engine)
        assert engine.keeper.plan["reader"][0] == 64
        if reader == "had it":
            preempt(engine, "reader")
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    assert causes(engine).keys() == ({"one", "reader"} if reader else {"one"})
    assert causes(engine).get("reader", Cause.STALE_PREFIX) is Cause.STALE_PREFIX
    assert answers_right(engine, "after")
    engine.balanced()


@pytest.mark.timeout(60)
@ON_DEVICE
@AHEAD
def test_who_found_pages_of_one_whose_page_was_not_cleared_ends_too(
    engine_of: Engines, ahead: bool, on_device: bool
) -> None:
    """Seen before the forward: what `one` computes in it is made of whatever lay in the page."""
    engine = engine_of(ahead=ahead, on_device=on_device)
    for name in ("one", "two"):
        engine.add(name, PROMPT, salt="s")
    news = fly(engine).kv_connector_output.kv_connector_worker_meta
    news.faults["one"] = PageFault(Cause.ZERO_TARGET, engine.keeper.tables["one"][0][0], 1, 2)
    engine.run()
    engine.add("after", PROMPT, salt="s")
    engine.run()

    assert causes(engine) == {"one": Cause.ZERO_TARGET, "two": Cause.STALE_PREFIX}
    assert engine.guard.mismatches() == {Cause.ZERO_TARGET: 1, Cause.STALE_PREFIX: 1}
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


@pytest.mark.timeout(60)
@ON_DEVICE
@pytest.mark.parametrize("aborted", [False, True], ids=["ends", "aborted"])
def test_pages_of_its_earlier_steps_are_there_and_those_of_the_step_in_which_it_was_wrong_are_not(
    engine_of: Engines, aborted: bool, on_device: bool
) -> None:
    """`one` computes its prompt in two steps, and is wrong in the second, that fills its fourth page."""
    engine = engine_of(ahead=True, on_device=on_device)
    text = [token % 90 for token in range(150)]
    engine.add("one", text, salt="s")
    engine.add("early", [3] * 20)
    engine.scheduler.max_num_scheduled_tokens = 108
    engine.step()
    engine.scheduler.max_num_scheduled_tokens = 128
    assert engine.keeper.plan == {"one": (0, 108)}
    engine.mischief = wrong_entry
    for name, length in (("three pages", 97), ("four pages", 129)):
        engine.add(name, text[:length], salt="s")
    fly(engine)
    assert engine.mischief is None
    assert [engine.keeper.plan[name][0] for name in ("one", "three pages", "four pages")] == [
        108,
        96,
        128,
    ]
    if aborted:  # and nobody has the pages any more, when it is known
        engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
        for name in ("four pages", "three pages"):
            preempt(engine, name)
    engine.run()

    assert causes(engine) == {"four pages": Cause.STALE_PREFIX} | ({} if aborted else {"one": Cause.FREED})
    assert engine.answers["three pages"].tokens == right_answer(text[:97], 12)
    assert engine.guard.mismatches() == {Cause.FREED: 1, Cause.STALE_PREFIX: 1}
    engine.balanced()


@pytest.mark.timeout(60)
@ON_DEVICE
def test_a_request_that_was_aborted_with_two_wrong_steps_under_way_is_counted_once(
    engine_of: Engines, on_device: bool
) -> None:
    engine = engine_of(ahead=True, on_device=on_device)
    engine.mischief = wrong_entry
    engine.add("one", PROMPT, salt="s")
    fly(engine)
    engine.mischief = wrong_entry
    fly(engine)
    assert engine.mischief is None
    engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    engine.run()

    assert engine.guard.mismatches() == {Cause.FREED: 1}
    engine.balanced()


@pytest.mark.timeout(60)
@AHEAD
@pytest.mark.parametrize("told", [True, False], ids=["with news", "without"])
def test_what_was_given_back_is_forgotten_when_its_steps_are_known(
    engine_of: Engines, ahead: bool, told: bool
) -> None:
    engine = engine_of(ahead=ahead)
    engine.add("one", PROMPT, salt="s")
    engine.add("longer", [3] * 20, max_tokens=40)
    engine.step()
    (page, tag), *_ = engine.guard.ledger.row("one", 0)
    parted = engine.scheduler.kv_cache_manager.parted
    engine.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    assert set(parted.who_had(page, tag)) == {"one"}
    fly(engine)
    while engine._flying:
        step, output = engine._flying.popleft()
        if not told:
            output.kv_connector_output.kv_connector_worker_meta = None
        engine.scheduler.update_from_output(step, output)

    assert parted.who_had(page, tag) == {}


@pytest.mark.timeout(60)
@AHEAD
def test_the_worker_is_told_whose_pages_a_request_has_found(engine_of: Engines, ahead: bool) -> None:
    """Also of one that is gone, while its step is under way."""
    engine = engine_of(ahead=ahead)
    for name, prompt in (("one", PROMPT[:33]), ("two", PROMPT), ("third", PROMPT)):
        engine.add(name, prompt, salt="s")
    engine.add("alone", [3] * 20)
    engine.step()
    if ahead:
        engine.scheduler.finish_requests("two", RequestStatus.FINISHED_ABORTED)
        engine.add("late", PROMPT, salt="s")
    step = engine.scheduler.schedule()

    first, second = orders_of(engine._flying[0][0]) if ahead else None, orders_of(step)
    assert second is not None
    if first is None:
        assert second.leans == {}
        return
    assert first.leans == {"two": {"one"}, "third": {"one", "two"}}
    assert second.leans == {"late": {"one", "two"}}


@pytest.mark.timeout(60)
def test_who_found_pages_of_one_that_is_flagged_and_is_not_in_the_step_goes_on(engine_of: Engines) -> None:
    """It is to write nothing in it, and what it wrote before is right: it holds its pages, say."""
    engine = engine_of(ahead=False)
    for _ in range(2):
        engine.add("one" if not engine.answers else "two", PROMPT, salt="s")
        engine.step()
    one = engine.scheduler.requests["one"]
    engine.scheduler.running.remove(one)
    (page, _), *_ = engine.guard.ledger.row("one", 0)
    engine.guard.ledger._flag(Cause.FREED, page, ["one"])
    engine.step()
    engine.run()

    assert causes(engine) == {"one": Cause.FREED}
    assert answers_right(engine, "two")
    engine.balanced()
