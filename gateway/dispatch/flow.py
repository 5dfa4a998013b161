"""Life of one request between its two engines. Pure: events in, actions out.

Facts that shape it:
  - prefill and decode are called together; decode alone decides what the client gets;
  - the count in decode's result and the tokens from the bus travel apart and arrive in either order;
  - a token is accepted only at the index that is due, so a lost frame shows as a gap, never as a hole;
  - nothing from an earlier attempt counts, however late it comes;
  - after the end every event is old news.
"""

from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from workers.api import DecodeResult, FaultKind

MAX_REFETCHES: Final = 2
"""In a row without a new token. After that the answer ends in an error, not in a guess."""


class StreamFault(StrEnum):
    """Failures that only the gateway can see. Also metric labels, beside `FaultKind`."""

    INCOMPLETE = "incomplete"
    SHUTTING_DOWN = "shutting_down"


Fault = FaultKind | StreamFault


# Events -------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """Tokens from the bus or from a refetch; `first_index` is the first one's place in the output."""

    attempt: int
    first_index: int
    token_ids: tuple[int, ...]


class DecodeReturned(msgspec.Struct, frozen=True):
    attempt: int
    result: DecodeResult


class DecodeFailed(msgspec.Struct, frozen=True):
    """The call has ended."""

    attempt: int
    fault: FaultKind


class PrefillReturned(msgspec.Struct, frozen=True):
    pass


class PrefillFailed(msgspec.Struct, frozen=True):
    """The call has ended."""


class PrefillLost(msgspec.Struct, frozen=True):
    """The replica is gone or silent. Its call may never return, and neither will its pages."""


class DecodeLost(msgspec.Struct, frozen=True):
    """The replica is gone or silent. Its call may never return."""


class Settled(msgspec.Struct, frozen=True):
    """The time that bus frames may lag behind the control call is over."""

    attempt: int


class Refetched(msgspec.Struct, frozen=True):
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]


class RefetchFailed(msgspec.Struct, frozen=True):
    attempt: int


class StopFound(msgspec.Struct, frozen=True):
    """A stop string is complete: the answer ends here, whatever decode still makes."""


class ClientGone(msgspec.Struct, frozen=True):
    pass


class DeadlinePassed(msgspec.Struct, frozen=True):
    pass


class GatewayLeaves(msgspec.Struct, frozen=True):
    """This gateway is told to stop, and the time that requests had to finish is over."""


Event = (
    Arrived
    | DecodeReturned
    | DecodeFailed
    | PrefillReturned
    | PrefillFailed
    | PrefillLost
    | DecodeLost
    | Settled
    | Refetched
    | RefetchFailed
    | StopFound
    | ClientGone
    | DeadlinePassed
    | GatewayLeaves
)


# Actions ------------------------------------------------------------------------------------------


class CallPrefill(msgspec.Struct, frozen=True):
    pass


class CallDecode(msgspec.Struct, frozen=True):
    attempt: int
    with_transfer: bool


class CancelPrefill(msgspec.Struct, frozen=True):
    pass


class CancelDecode(msgspec.Struct, frozen=True):
    pass


class Emit(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]


class AwaitSettling(msgspec.Struct, frozen=True):
    attempt: int


class Refetch(msgspec.Struct, frozen=True):
    attempt: int
    from_index: int


class Finish(msgspec.Struct, frozen=True):
    """The answer is complete. `result` is None when a stop string ended it before decode did."""

    result: DecodeResult | None


class Fail(msgspec.Struct, frozen=True):
    fault: Fault


class Abandon(msgspec.Struct, frozen=True):
    """The client left: nothing more to say to anyone."""


Action = (
    CallPrefill
    | CallDecode
    | CancelPrefill
    | CancelDecode
    | Emit
    | AwaitSettling
    | Refetch
    | Finish
    | Fail
    | Abandon
)


# State --------------------------------------------------------------------------------------------


class State(msgspec.Struct, frozen=True, kw_only=True):
    attempt: int = 0
    received: int = 0
    """Tokens accepted; the index that is due."""
    prefill_running: bool = False
    decode_running: bool = True
    result: DecodeResult | None = None
    early: tuple[Arrived, ...] = ()
    """Items beyond a gap, kept until the refetch has filled it."""
    refetching: bool = False
    refetches: int = 0
    """Since the last accepted token."""
    ended: bool = False


Step = tuple[State, tuple[Action, ...]]


def start(*, with_prefill: bool) -> Step:
    """The first state, and the calls to make. Both are made at once."""
    calls: tuple[Action, ...] = (CallDecode(0, with_prefill),)
    if with_prefill:
        calls = (*calls, CallPrefill())
    return State(prefill_running=with_prefill), calls


def step(state: State, event: Event) -> Step:
    """Next state, and what must be done now, in order."""
    if state.ended:
        return state, ()
    match event:
        case Arrived() | Refetched() | DecodeReturned() | DecodeFailed() | Settled() | RefetchFailed():
            return _from_decode(state, event) if event.attempt == state.attempt else (state, ())
        case PrefillReturned():
            return replace(state, prefill_running=False), ()
        case PrefillFailed():
            return _restart_alone(replace(state, prefill_running=False))
        case PrefillLost():
            return _restart_alone(state)
        case DecodeLost():
            return _end(state, Fail(FaultKind.ENGINE_DEAD))
        case StopFound():
            return _end(state, Finish(state.result))
        case ClientGone():
            return _end(state, Abandon())
        case DeadlinePassed():
            return _end(state, Fail(FaultKind.DEADLINE))
        case GatewayLeaves():
            return _end(state, Fail(StreamFault.SHUTTING_DOWN))


def _from_decode(
    state: State, event: Arrived | Refetched | DecodeReturned | DecodeFailed | Settled | RefetchFailed
) -> Step:
    match event:
        case Arrived():
            return _arrived(state, event)
        case Refetched():
            return _refetched(replace(state, refetching=False), event)
        case RefetchFailed():
            return _recover(replace(state, refetching=False))
        case DecodeReturned():
            state = replace(state, result=event.result, decode_running=False)
            ended, actions = _settle(state)
            return (ended, actions) if ended.ended else (state, (AwaitSettling(state.attempt),))
        case DecodeFailed():
            state = replace(state, decode_running=False)
            if event.fault is FaultKind.PEER_UNKNOWN and state.received == 0 and state.attempt == 0:
                # Decode cannot find the prefill engine: it can still compute the prompt itself.
                return _restart_alone(state)
            return _end(state, Fail(event.fault))
        case Settled():
            return _recover(state)


def _arrived(state: State, item: Arrived) -> Step:
    if item.first_index < state.received:
        return state, ()
    if item.first_index > state.received:
        state = replace(state, early=(*state.early, item))
        return (state, ()) if state.refetching else _recover(state)
    return _accept(state, item.token_ids)


def _refetched(state: State, answer: Refetched) -> Step:
    known = state.received - answer.first_index
    if known < 0 or len(answer.token_ids) <= known:
        # It knows no more than we do; the next try, if one is left, comes after the bus had time to speak.
        return (state, ()) if state.result is None and not state.early else _recover(state)
    return _accept(state, answer.token_ids[known:])


def _accept(state: State, token_ids: tuple[int, ...]) -> Step:
    """Take tokens at the index that is due, and whatever of `early` then fits."""
    first = state.received == 0
    fresh, due, later = _with_early(state, token_ids)
    state = replace(state, received=due, early=later, refetches=0)
    actions: tuple[Action, ...] = (Emit(fresh),) if fresh else ()
    if first and fresh and state.prefill_running:
        # Decode has begun, so it needs nothing more from prefill.
        state, actions = replace(state, prefill_running=False), (CancelPrefill(), *actions)
    state, more = _settle(state)
    if not more and state.early and not state.refetching and not state.ended:
        state, more = _recover(state)
    return state, (*actions, *more)


def _with_early(state: State, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], int, tuple[Arrived, ...]]:
    """All tokens that can be taken now, the index that is due then, and what still lies beyond a gap."""
    fresh, due = token_ids, state.received + len(token_ids)
    if not state.early:
        return fresh, due, ()
    later: list[Arrived] = []
    for item in sorted(state.early, key=lambda early: early.first_index):
        if item.first_index == due:
            fresh, due = (*fresh, *item.token_ids), due + len(item.token_ids)
        elif item.first_index > due:
            later.append(item)
    return fresh, due, tuple(later)


def _settle(state: State) -> Step:
    """End the answer if decode has returned and its count agrees with ours."""
    if state.result is None or state.received < state.result.output_tokens:
        return state, ()
    if state.received > state.result.output_tokens:
        return _end(state, Fail(StreamFault.INCOMPLETE))
    return _end(state, Finish(state.result))


def _recover(state: State) -> Step:
    """Ask once more for what is missing, or give up."""
    if state.refetching:
        return state, ()
    if state.refetches >= MAX_REFETCHES:
        return _end(state, Fail(StreamFault.INCOMPLETE))
    state = replace(state, refetching=True, refetches=state.refetches + 1)
    return state, (Refetch(state.attempt, state.received),)


def _restart_alone(state: State) -> Step:
    """Let decode compute the prompt itself, if nothing was sent to the client yet."""
    if state.received or state.result is not None or state.attempt:
        return state, ()
    actions: tuple[Action, ...] = (CancelPrefill(),) if state.prefill_running else ()
    if state.decode_running:
        actions = (*actions, CancelDecode())
    restarted = State(attempt=state.attempt + 1)
    return restarted, (*actions, CallDecode(restarted.attempt, with_transfer=False))


def _end(state: State, last: Finish | Fail | Abandon) -> Step:
    """Stop whatever still runs, then say how it ended."""
    actions: tuple[Action, ...] = (CancelPrefill(),) if state.prefill_running else ()
    if state.decode_running:
        actions = (*actions, CancelDecode())
    ended = replace(state, prefill_running=False, decode_running=False, early=(), ended=True)
    return ended, (*actions, last)
