"""Batching of the scripted engine over vLLM's own block pool."""

from itertools import cycle

import pytest

from workers.api import FinishReason
from workers.engine.scripted_batch import Batch, Output, Sequence, Work
from workers.engine.scripted_pages import Pages

BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def big() -> Pages:
    return Pages(256, BLOCK)


def a_batch(*, places: int = 8, tokens: int = 64, context: int = 512) -> Batch:
    return Batch(max_sequences=places, max_batched_tokens=tokens, context_length=context)


def a_sequence(
    pages: Pages, name: str, prompt: int, *, answer: int = 100, salt: str = "salt", stop: int | None = None
) -> Sequence:
    start = 1000 * (sum(map(ord, name)) % 37)  # prompts of different names share no page
    return Sequence(
        holder=pages.holder(name, tuple(range(start, start + prompt)), salt),
        script=cycle((7, 8, 9)),
        max_tokens=answer,
        stop_token_ids=frozenset() if stop is None else frozenset({stop}),
    )


def step(batch: Batch) -> tuple[Work | None, list[Output]]:
    work = batch.schedule()
    return work, batch.complete() if work else []


def run(batch: Batch, steps: int = 1000) -> list[Output]:
    """Until nothing is left."""
    found: list[Output] = []
    for _ in range(steps):
        work, outputs = step(batch)
        if work is None:
            return found
        found += outputs
    raise AssertionError("the batch does not come to an end")


def test_a_prompt_longer_than_a_step_is_computed_in_pieces_and_then_answered(big: Pages) -> None:
    batch = a_batch(tokens=64)
    batch.add(a_sequence(big, "long", 150, answer=2))

    seen = [step(batch) for _ in range(5)]

    assert [work and work.prefill_tokens for work, _ in seen] == [64, 64, 22, 0, None]
    assert [len(outputs) for _, outputs in seen] == [0, 0, 1, 1, 0]
    assert seen[3][1][0].finish is FinishReason.LENGTH


def test_pages_return_when_a_request_ends_is_aborted_or_stops(big: Pages) -> None:
    batch = a_batch()
    ends, left, stops = (
        a_sequence(big, "ends", 20, answer=3),
        a_sequence(big, "left", 20),
        a_sequence(big, "stops", 20, stop=8),
    )
    for sequence in (ends, left, stops):
        batch.add(sequence)
    step(batch)
    assert big.free == big.total - 6

    batch.remove(left)
    outputs = run(batch)

    assert big.free == big.total
    assert {(o.sequence, o.finish) for o in outputs if o.finish} == {
        (ends, FinishReason.LENGTH),
        (stops, FinishReason.STOP),
    }
    batch.remove(left)  # once more changes nothing
    assert big.free == big.total


def test_an_abort_in_the_middle_of_a_step_gives_no_token(big: Pages) -> None:
    batch = a_batch()
    sequence = a_sequence(big, "aborted", 20)
    batch.add(sequence)
    assert batch.schedule() is not None

    batch.remove(sequence)

    assert batch.complete() == []
    assert big.free == big.total


def test_a_prefix_is_found_again_under_the_same_salt_only(big: Pages) -> None:
    batch = a_batch()

    def cached(salt: str, prompt: int) -> int | None:
        sequence = a_sequence(big, "prefix", prompt, answer=1, salt=salt)
        batch.add(sequence)
        run(batch)
        return sequence.cached_tokens

    # Never all of the prompt: its last token is computed in any case.
    assert [cached("one", 64), cached("one", 64), cached("two", 64), cached("one", 65)] == [0, 48, 0, 64]


def test_a_place_in_the_batch_is_waited_for_in_order(big: Pages) -> None:
    batch = a_batch(places=1)
    first, second, third = (a_sequence(big, name, 4, answer=2) for name in ("a", "b", "c"))
    for sequence in (first, second, third):
        batch.add(sequence)
    step(batch)
    assert (batch.running, batch.waiting) == (1, 2)

    batch.remove(second)

    assert [output.sequence for output in run(batch)] == [first, third, third]


def test_with_too_few_pages_the_youngest_is_preempted_and_all_answers_are_whole() -> None:
    pages = Pages(12, BLOCK)
    batch = a_batch(context=12 * BLOCK)
    sequences = [a_sequence(pages, name, 40, answer=100) for name in ("x", "y", "z")]
    for sequence in sequences:
        batch.add(sequence)

    outputs = run(batch)

    assert batch.preemptions > 0
    for sequence in sequences:
        mine = [output.token_id for output in outputs if output.sequence is sequence]
        assert mine == [(7, 8, 9)[n % 3] for n in range(100)]
    assert pages.free == pages.total


def test_a_request_that_finds_no_pages_waits_and_holds_none() -> None:
    pages = Pages(8, BLOCK)
    batch = a_batch(context=8 * BLOCK)
    for name in ("first", "second"):
        batch.add(a_sequence(pages, name, 70, answer=1))

    batch.schedule()

    assert (batch.running, batch.waiting) == (1, 1)
    assert pages.free == pages.total - 4  # 64 of the 70 tokens: what one step computes
    batch.complete()
    run(batch)
    assert pages.free == pages.total


def test_an_answer_ends_where_the_context_does(big: Pages) -> None:
    batch = a_batch(context=64)
    batch.add(a_sequence(big, "context", 60, answer=100))

    outputs = run(batch)

    assert [output.finish for output in outputs] == [None, None, None, FinishReason.LENGTH]
