"""Life of one transfer on the prefill side. All of it: state may change nowhere else.

The table is the specification. Two facts shape it:
  - either side may speak first: the gateway's call announces the transfer, the peer's offer asks for it;
  - pages stay pinned until the receiver has everything (DONE) or nobody wants them any more.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class State(Enum):
    ANNOUNCED = auto()  # a request of ours computes the pages; nobody has asked for them
    PARKED = auto()  # somebody asks; no request of ours is known yet
    SENDING = auto()  # both: pages leave as they are completed
    FLUSHED = auto()  # the last byte was handed to the wire
    STOPPING = auto()  # given up; a page group is still on the wire
    CLOSED = auto()  # final: nothing is remembered of it


class Event(Enum):
    ANNOUNCE = auto()
    OFFER = auto()
    MISFIT = auto()  # the offer is not from the announced peer, or contracts or layouts differ
    LAST_SENT = auto()
    DONE = auto()
    ABORT = auto()  # the receiver does not want the pages
    GONE = auto()  # our request ended without completing its pages
    LINK_DOWN = auto()
    DEADLINE = auto()
    QUIET = auto()  # nothing of this transfer is on the wire


class Do(Enum):
    SEND_READY = auto()
    SEND_FAILED = auto()
    SEND_DRAINED = auto()
    RELEASE_PAGES = auto()


S, E = State, Event
_END = (S.CLOSED, (Do.RELEASE_PAGES,))
_REFUSE = (S.CLOSED, (Do.SEND_FAILED, Do.RELEASE_PAGES))
_STOP = (S.STOPPING, (Do.RELEASE_PAGES,))

TABLE: Final[Mapping[tuple[State, Event], tuple[State, tuple[Do, ...]]]] = {
    (S.ANNOUNCED, E.OFFER): (S.SENDING, (Do.SEND_READY,)),
    (S.ANNOUNCED, E.MISFIT): _REFUSE,
    (S.ANNOUNCED, E.ABORT): (S.CLOSED, (Do.SEND_DRAINED, Do.RELEASE_PAGES)),
    (S.ANNOUNCED, E.GONE): _END,
    (S.ANNOUNCED, E.DEADLINE): _END,
    (S.PARKED, E.ANNOUNCE): (S.SENDING, (Do.SEND_READY,)),
    (S.PARKED, E.MISFIT): _REFUSE,
    (S.PARKED, E.ABORT): (S.CLOSED, (Do.SEND_DRAINED,)),
    (S.PARKED, E.DEADLINE): (S.CLOSED, (Do.SEND_FAILED,)),
    (S.PARKED, E.LINK_DOWN): (S.CLOSED, ()),
    (S.PARKED, E.GONE): (S.CLOSED, (Do.SEND_FAILED,)),
    (S.SENDING, E.LAST_SENT): (S.FLUSHED, ()),
    # The receiver may have everything before our own lane reports that it has sent it.
    (S.SENDING, E.DONE): _END,
    (S.SENDING, E.ABORT): _STOP,
    (S.SENDING, E.GONE): _STOP,
    (S.SENDING, E.DEADLINE): _STOP,
    (S.SENDING, E.LINK_DOWN): _REFUSE,
    (S.FLUSHED, E.DONE): _END,
    (S.FLUSHED, E.ABORT): (S.CLOSED, (Do.SEND_DRAINED, Do.RELEASE_PAGES)),
    # The bytes are out and the pages no longer needed; DONE is only news.
    (S.FLUSHED, E.GONE): _END,
    (S.FLUSHED, E.DEADLINE): _END,
    (S.FLUSHED, E.LINK_DOWN): _REFUSE,
    (S.STOPPING, E.QUIET): (S.CLOSED, (Do.SEND_FAILED,)),
    (S.STOPPING, E.LINK_DOWN): (S.CLOSED, ()),
    (S.STOPPING, E.LAST_SENT): (S.STOPPING, ()),
    (S.STOPPING, E.ABORT): (S.STOPPING, ()),
    (S.STOPPING, E.GONE): (S.STOPPING, ()),
    (S.STOPPING, E.DEADLINE): (S.STOPPING, ()),
}
