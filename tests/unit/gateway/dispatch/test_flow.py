"""Every order in which engines, bus and client can speak, up to a depth, and the rules that hold in all."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dispatch import flow
from gateway.dispatch.flow import (
    Abandon,
    Action,
    Arrived,
    CallDecode,
    CallPrefill,
    CancelDecode,
    CancelPrefill,
    ClientGone,
    DeadlinePassed,
    DecodeFailed,
    DecodeLost,
    DecodeReturned,
    Emit,
    Event,
    Fail,
    Finish,
    PrefillFailed,
    PrefillLost,
    PrefillReturned,
    Refetch,
    Refetched,
    RefetchFailed,
    Settled,
    StopFound,
    StreamFault,
)
from workers.api import DecodeResult, FaultKind, FinishReason

OUTPUT = (10, 11, 12)


def result(tokens: int = len(OUTPUT)) -> DecodeResult:
    return DecodeResult(
        output_tokens=tokens, finish_reason=FinishReason.STOP, cached_tokens=0, handoff=None, seconds=0.0
    )


class World:
    """Feeds a flow and keeps the books that every schedule must balance."""

    def __init__(self, *, with_prefill: bool = True) -> None:
        self.state, actions = flow.start(with_prefill=with_prefill)
        self.actions: list[Action] = []
        self.emitted: list[int] = []
        self.open_calls: Counter[str] = Counter()
        self._note(actions)

    def say(self, *events: Event) -> "World":
        for event in events:
            match event:
                case PrefillReturned() | PrefillFailed():
                    self.open_calls["prefill"] = 0
                case DecodeReturned(attempt=attempt) | DecodeFailed(attempt=attempt):
                    if attempt == self.state.attempt:
                        self.open_calls["decode"] = 0
                case _:
                    pass
            self.state, actions = flow.step(self.state, event)
            self._note(actions)
        return self

    def _note(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            assert not self.ended, f"{action} after the end"
            self.actions.append(action)
            match action:
                case Emit(token_ids=token_ids):
                    self.emitted += token_ids
                case CallPrefill():
                    self.open_calls["prefill"] += 1
                case CallDecode():
                    self.open_calls["decode"] += 1
                case CancelPrefill():
                    assert self.open_calls["prefill"] == 1, "cancelled what does not run"
                    self.open_calls["prefill"] = 0
                case CancelDecode():
                    assert self.open_calls["decode"] == 1, "cancelled what does not run"
                    self.open_calls["decode"] = 0
                case _:
                    pass
            assert max(self.open_calls.values()) <= 1, "called twice at once"

    @property
    def ended(self) -> bool:
        return any(isinstance(action, Finish | Fail | Abandon) for action in self.actions)

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for action in self.actions if isinstance(action, kind)]


ALPHABET: tuple[Event, ...] = (
    Arrived(0, 0, OUTPUT[:1]),
    Arrived(0, 1, OUTPUT[1:]),
    Arrived(1, 0, OUTPUT),
    DecodeReturned(0, result()),
    DecodeReturned(1, result()),
    DecodeFailed(0, FaultKind.INTERNAL),
    DecodeFailed(0, FaultKind.PEER_UNKNOWN),
    DecodeLost(),
    PrefillReturned(),
    PrefillFailed(),
    PrefillLost(),
    Settled(0),
    Refetched(0, 0, OUTPUT[:2]),
    RefetchFailed(0),
    StopFound(),
    ClientGone(),
    DeadlinePassed(),
)


def possible(world: World, event: Event) -> bool:
    """Whether the world could say this now: a call that does not run cannot return."""
    match event:
        case PrefillReturned() | PrefillFailed():
            return world.open_calls["prefill"] == 1
        case DecodeReturned(attempt=attempt) | DecodeFailed(attempt=attempt):
            return world.open_calls["decode"] == 1 and attempt == world.state.attempt
        case Refetched() | RefetchFailed():
            return world.state.refetching
        case Settled():
            return world.state.result is not None
        case StopFound():
            return bool(world.emitted)
        case _:
            return True


def explore(said: tuple[Event, ...], depth: int) -> Iterator[tuple[World, tuple[Event, ...]]]:
    """Every world that up to `depth` further events can lead to. The first end of a request ends a branch."""
    world = World().say(*said)
    yield world, said
    if depth and not world.ended:
        for event in ALPHABET:
            if possible(world, event):
                yield from explore((*said, event), depth - 1)


def test_books_balance_under_every_schedule_of_four_events() -> None:
    finished = 0
    for world, said in explore((), 4):
        assert tuple(world.emitted) == OUTPUT[: len(world.emitted)], said
        assert len(world.of(CallDecode)) <= 2, said
        if world.ended:
            assert not any(world.open_calls.values()), said
            assert all(flow.step(world.state, event) == (world.state, ()) for event in ALPHABET), said
        else:
            # Something that still runs or is awaited can move the request on.
            assert world.open_calls["decode"] or world.state.result is not None, said
        if world.of(Finish) and StopFound() not in said:
            finished += 1
            assert tuple(world.emitted) == OUTPUT, said
    assert finished > 10, "the schedules must reach the end that matters"


@given(st.data())
def test_answer_is_whole_however_the_bus_orders_drops_and_repeats_frames(data: st.DataObject) -> None:
    """The engine remembers everything, so each gap can be filled: the text ends whole and in order."""
    tokens = tuple(range(data.draw(st.integers(1, 12))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=4)) | {0, len(tokens)})
    frames = [Arrived(0, a, tokens[a:b]) for a, b in pairwise(cuts)]
    heard = data.draw(st.lists(st.sampled_from(frames), max_size=8))
    returned_at = data.draw(st.integers(0, len(heard)))
    world = World()

    for place, frame in enumerate([*heard, None]):
        if place == returned_at:
            world.say(DecodeReturned(0, result(len(tokens))))
        if frame is not None:
            world.say(frame)
        if world.state.refetching and data.draw(st.booleans()):
            _answer_refetch(world, tokens)
    for _ in range(3):
        if world.state.refetching:
            _answer_refetch(world, tokens)
        world.say(Settled(0))

    assert tuple(world.emitted) == tokens
    assert world.actions[-1] == Finish(result(len(tokens)))


def _answer_refetch(world: World, tokens: tuple[int, ...]) -> None:
    asked = world.of(Refetch)[-1]
    assert isinstance(asked, Refetch)
    world.say(Refetched(0, asked.from_index, tokens[asked.from_index :]))


def test_both_engines_are_called_at_once() -> None:
    assert World().actions == [CallDecode(0, with_transfer=True), CallPrefill()]


def test_without_prefill_decode_gets_no_transfer() -> None:
    assert World(with_prefill=False).actions == [CallDecode(0, with_transfer=False)]


def test_first_token_cancels_a_prefill_that_still_runs_before_it_is_sent_on() -> None:
    world = World().say(Arrived(0, 0, OUTPUT))

    assert world.actions[2:] == [CancelPrefill(), Emit(OUTPUT)]


@pytest.mark.parametrize("event", [PrefillFailed(), PrefillLost(), DecodeFailed(0, FaultKind.PEER_UNKNOWN)])
def test_prefill_that_cannot_deliver_lets_decode_begin_again_alone(event: Event) -> None:
    world = World().say(event)

    assert world.actions[-1] == CallDecode(1, with_transfer=False)
    assert world.open_calls == {"prefill": 0, "decode": 1}


def test_prefill_that_fails_after_the_first_token_changes_nothing() -> None:
    world = World().say(PrefillReturned(), Arrived(0, 0, OUTPUT[:1]))
    before = list(world.actions)

    assert world.say(PrefillLost()).actions == before


def test_tokens_of_the_first_attempt_are_dropped_after_a_restart() -> None:
    world = World().say(PrefillFailed(), Arrived(0, 0, (99,)), Arrived(1, 0, OUTPUT))

    assert tuple(world.emitted) == OUTPUT


def test_unknown_peer_twice_is_an_error_and_not_a_hang() -> None:
    world = World().say(DecodeFailed(0, FaultKind.PEER_UNKNOWN), DecodeFailed(1, FaultKind.PEER_UNKNOWN))

    assert world.actions[-1] == Fail(FaultKind.PEER_UNKNOWN)


def test_result_before_the_last_frame_waits_and_then_asks() -> None:
    world = World().say(PrefillReturned(), Arrived(0, 0, OUTPUT[:2]), DecodeReturned(0, result()))
    assert not world.of(Refetch)

    assert world.say(Settled(0)).actions[-1] == Refetch(0, 2)


def test_two_refetches_without_a_new_token_end_in_an_error() -> None:
    world = World().say(Arrived(0, 1, OUTPUT[1:]), RefetchFailed(0), RefetchFailed(0))

    assert world.actions[-1] == Fail(StreamFault.INCOMPLETE)
    assert len(world.of(Refetch)) == 2


def test_any_number_of_gaps_is_filled_as_long_as_each_fill_brings_a_token() -> None:
    """A long answer over a bad line loses many frames."""
    tokens = tuple(range(100, 120))
    world = World().say(PrefillReturned())
    for index in range(0, 20, 2):
        world.say(Arrived(0, index + 1, tokens[index + 1 : index + 2]))
        world.say(Refetched(0, index, tokens[index : index + 1]))
    world.say(DecodeReturned(0, result(20)))

    assert tuple(world.emitted) == tokens
    assert len(world.of(Refetch)) == 10
    assert world.actions[-1] == Finish(result(20))


def test_more_tokens_than_decode_counted_is_an_error() -> None:
    world = World().say(Arrived(0, 0, OUTPUT), DecodeReturned(0, result(2)))

    assert world.actions[-1] == Fail(StreamFault.INCOMPLETE)


def test_lost_decode_replica_has_its_call_cancelled() -> None:
    """Its call may never return by itself: a stopped process raises nothing."""
    world = World().say(DecodeLost())

    assert world.actions[-3:] == [CancelPrefill(), CancelDecode(), Fail(FaultKind.ENGINE_DEAD)]
