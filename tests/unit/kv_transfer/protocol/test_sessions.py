"""Both transfer tables, over every schedule in which the world can speak."""

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from itertools import product

import pytest

from kv_transfer.protocol import recv_session as r
from kv_transfer.protocol import send_session as s
from kv_transfer.protocol.table import IllegalTransition, step


def possible_now(table: dict, state: Enum) -> list[Enum]:
    return [event for (at, event) in table if at is state]


def walks(table: dict, start: Enum, length: int) -> Iterator[tuple[list[Enum], Enum, Counter]]:
    """Every sequence of listed events of at most `length`, with where it ends and what was done."""
    pending = [([], start, Counter())]
    while pending:
        path, state, did = pending.pop()
        yield path, state, did
        if len(path) < length:
            for event in possible_now(table, state):
                after, actions = step(table, state, event)
                pending.append(([*path, event], after, did + Counter(actions)))


def test_a_receive_is_reported_to_the_engine_exactly_once() -> None:
    """Loaded or failed, never both, never twice, and always by the time it closes."""
    for path, state, did in walks(r.TABLE, r.State.QUEUED, 6):
        handed, failed = did[r.Do.HAND_TO_ENGINE], did[r.Do.REPORT_FAILED]

        assert handed <= 1, path
        assert failed <= 1, path
        if failed and handed:
            # Handed over, then cancelled before the engine had copied: it must learn of the end.
            assert r.Event.CANCELLED in path, path
        if state is r.State.CLOSED:
            assert handed + failed >= 1, path


def test_staging_is_released_exactly_when_a_receive_closes() -> None:
    for path, state, did in walks(r.TABLE, r.State.QUEUED, 6):
        assert did[r.Do.RELEASE_STAGING] == (state is r.State.CLOSED), path


def test_an_aborted_receive_keeps_its_staging_until_the_wire_is_quiet() -> None:
    for path, state, did in walks(r.TABLE, r.State.QUEUED, 6):
        if did[r.Do.SEND_OFFER] and did[r.Do.SEND_ABORT] and state is r.State.CLOSED:
            quiet = {r.Event.DRAINED, r.Event.REFUSED, r.Event.LINK_DOWN}
            assert path[-1] in quiet or did[r.Do.CLOSE_LINK], path


def test_the_sender_hears_done_or_abort_but_not_both() -> None:
    for path, _, did in walks(r.TABLE, r.State.QUEUED, 6):
        assert did[r.Do.SEND_DONE] + did[r.Do.SEND_ABORT] <= 1, path


def test_pages_of_an_announced_send_are_released_exactly_once_by_the_time_it_closes() -> None:
    for path, state, did in walks(s.TABLE, s.State.ANNOUNCED, 5):
        released = did[s.Do.RELEASE_PAGES]

        assert released <= 1, path
        if state is s.State.CLOSED:
            assert released == 1, path


def test_a_parked_offer_that_is_never_announced_releases_nothing() -> None:
    for path, _, did in walks(s.TABLE, s.State.PARKED, 3):
        if s.Event.ANNOUNCE not in path and s.Event.MISFIT not in path:
            assert did[s.Do.RELEASE_PAGES] == 0, path


def test_a_sender_that_closes_early_tells_the_receiver_unless_the_link_is_down() -> None:
    """Otherwise the receiver would wait for its deadline."""
    told = {s.Do.SEND_FAILED, s.Do.SEND_DRAINED}
    for path, state, did in walks(s.TABLE, s.State.PARKED, 5):
        if state is s.State.CLOSED and not {s.Event.DONE, s.Event.LINK_DOWN} & set(path):
            flushed = s.Event.LAST_SENT in path
            assert flushed or any(did[action] for action in told), path


@pytest.mark.parametrize(
    ("table", "states", "deadline"),
    [(r.TABLE, r.State, r.Event.DEADLINE), (s.TABLE, s.State, s.Event.DEADLINE)],
    ids=["receive", "send"],
)
def test_every_state_that_can_last_has_a_deadline(table: dict, states: type[Enum], deadline: Enum) -> None:
    assert {state for state in states if (state, deadline) not in table} == {states["CLOSED"]}


@pytest.mark.parametrize(
    ("table", "start"), [(r.TABLE, r.State.QUEUED), (s.TABLE, s.State.PARKED)], ids=["receive", "send"]
)
def test_every_row_of_the_table_can_be_reached(table: dict, start: Enum) -> None:
    starts = [start, s.State.ANNOUNCED] if start is s.State.PARKED else [start]
    reached = {state for first in starts for _, state, _ in walks(table, first, 6)}

    assert {state for state, _ in table} <= reached


def test_an_unlisted_pair_changes_nothing_and_is_named() -> None:
    listed = set(r.TABLE)
    unlisted = [pair for pair in product(r.State, r.Event) if pair not in listed]

    assert unlisted
    for state, event in unlisted:
        with pytest.raises(IllegalTransition, match=f"{event.name} while {state.name}"):
            step(r.TABLE, state, event)
