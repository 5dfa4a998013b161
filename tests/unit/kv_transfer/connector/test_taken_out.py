"""Requests that a page fault ends are taken out of a step: nothing of them stays, and others go on."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kv_transfer.api.integrity import IntegrityCause as Cause
from kv_transfer.api.integrity import PageFault
from kv_transfer.integrity.verify import Tables
from tests.support.page_mischief import AFTER, ENDS, PROMPTS, Once, answers
from tests.support.toy_engine import Engines, ToyEngine


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ahead", [False, True], ids=["one step", "two steps in flight"])
def test_a_step_of_which_nothing_is_left_gives_its_pages_back(engine_of: Engines, ahead: bool) -> None:
    engine = engine_of(ahead=ahead)
    engine.add("a", PROMPTS["a"], salt="a")
    for _ in range(4):
        engine.step()
    block = engine.pool.blocks[engine.keeper.tables["a"][0][1]]
    engine.pool.free_blocks([block])
    engine.run()
    engine.add("later", PROMPTS["b"], salt="b")
    engine.run()

    assert engine.guard.mismatches() == {Cause.FREED: 1}
    assert engine.answers["later"].reason == "length"
    engine.balanced()


@pytest.mark.timeout(60)
def test_of_requests_that_are_taken_out_nothing_is_left_in_the_step(engine_of: Engines) -> None:
    """The model runner would miss what it needs of them, or compute them all the same."""
    engine = engine_of()
    for name in "ab":
        engine.add(name, PROMPTS[name][:40], salt=name)
    engine.step()
    engine.add("c", PROMPTS["c"][:40], salt="c")
    engine.add("new", PROMPTS["c"][:40], salt="new")
    for name in ("a", "new"):
        engine.guard._flag(engine.scheduler, name, PageFault(Cause.FREED, 1, 2, 3))
    step = engine.scheduler.schedule()

    cached = step.scheduled_cached_reqs
    assert step.num_scheduled_tokens == {"b": 1, "c": 40}
    assert step.total_num_scheduled_tokens == 41
    assert [new.req_id for new in step.scheduled_new_reqs] == ["c"]
    assert cached.req_ids == ["b"]
    assert cached.num_computed_tokens == [40]
    assert len(cached.new_block_ids) == len(cached.num_output_tokens) == 1
    assert engine.scheduler.prev_step_scheduled_req_ids == {"b", "c"}


@pytest.mark.timeout(60)
def test_a_request_that_has_ended_and_holds_its_pages_is_not_ended_again(engine_of: Engines) -> None:
    engine = engine_of()
    engine.add("a", PROMPTS["a"], salt="a")
    engine.step()
    status, engine.scheduler.requests["a"].status = (
        engine.scheduler.requests["a"].status,
        RequestStatus.FINISHED_LENGTH_CAPPED,
    )
    engine.guard._flag(engine.scheduler, "a", PageFault(Cause.FREED, 1, 2, 3))

    assert engine.guard.ending(engine.scheduler) == {}
    engine.scheduler.requests["a"].status = status
    assert engine.guard.ending(engine.scheduler) == {}, "nor remembered"
    for cause in (Cause.FREED, Cause.SHIFTED):
        engine.guard._flag(engine.scheduler, "a", PageFault(cause, 1, 2, 3))
    assert engine.guard.ending(engine.scheduler)["a"].cause is Cause.FREED, "what was found first"


@pytest.mark.timeout(60)
def test_a_request_with_the_name_of_one_that_was_ended_is_another(engine_of: Engines) -> None:
    right = answers(engine_of())["a"]
    engine = engine_of()
    answers(engine, Once(*(ENDS["first entry"][0], AFTER["decode"])))
    for name in ("between", "a"):
        engine.add(name, PROMPTS["a"], salt="a")
        engine.run()

    assert (engine.answers["a"].reason, engine.answers["a"].tokens) == ("length", right)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("taken_out", [False, True], ids=["nothing to do", "all taken out"])
def test_vllm_has_counted_as_many_steps_done_as_it_has_sent(engine_of: Engines, taken_out: bool) -> None:
    """One too many, and pages that a step under way reads would be given to others; one too few, and none."""
    engine = engine_of(ahead=True)
    engine.add("a", PROMPTS["a"], salt="a")
    engine.step()
    engine._take_in()
    if taken_out:
        engine.guard._flag(engine.scheduler, "a", PageFault(Cause.FREED, 1, 2, 3))
    else:
        engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    engine._take_in()

    assert engine.scheduler.sched_step_seq == 1 + taken_out
    assert engine.scheduler.processed_step_seq == engine.scheduler.sched_step_seq


@pytest.mark.timeout(60)
def test_whoever_was_given_the_last_page_of_a_victim_goes_on(engine_of: Engines) -> None:
    """It is among those that the victim was to write to in that step."""

    def last_page_freed(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
        engine.pool.free_blocks([engine.pool.blocks[engine.keeper.tables["a"][0][-1]]])
        engine.add("late", [9] * 70)

    right = answers(engine_of())
    engine = engine_of(pages=13)
    got = answers(engine, Once(last_page_freed, AFTER["decode"]))

    assert {name: got[name] for name in "bc"} == {name: right[name] for name in "bc"}
    assert engine.guard.mismatches() == {Cause.REALLOCATED: 1}
    assert [engine.answers[name].reason for name in ("a", "late")] == ["error", "length"]
    engine.balanced()


@pytest.mark.timeout(60)
def test_of_one_that_was_resumed_nothing_is_left_in_the_step_either(engine_of: Engines) -> None:
    engine = engine_of()
    for name in "ab":
        engine.add(name, PROMPTS[name][:40], salt=name)
    engine.step()
    request = engine.scheduler.requests["a"]
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.guard._flag(engine.scheduler, "a", PageFault(Cause.FREED, 1, 2, 3))
    cached = engine.scheduler.schedule().scheduled_cached_reqs

    assert cached.req_ids == ["b"]
    assert cached.resumed_req_ids == set()
    assert "a" not in cached.all_token_ids
