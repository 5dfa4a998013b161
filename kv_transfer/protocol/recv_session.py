"""Life of one transfer on the decode side. All of it: state may change nowhere else.

The table is the specification. Four facts shape it:
  - bytes land in staging and are copied into pages by the engine thread, so pages of a request that
    went away may be freed at once; staging may not, until the wire is quiet;
  - a posted receive cannot be recalled: DRAINING lasts until the sender confirms or the link is down;
  - staging is bounded: an order may have to wait for room before it is offered;
  - peers and schedulers race: news about a transfer that is CLOSED, hence forgotten, is normal.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Final


class State(Enum):
    QUEUED = auto()  # no room in staging yet; the peer knows nothing of it
    OFFERED = auto()  # offer posted, no answer yet
    RECEIVING = auto()  # accepted; pages are coming
    ARRIVED = auto()  # every page is in staging and its checksum agrees
    DRAINING = auto()  # unwanted, but the wire may still write into staging
    CLOSED = auto()  # final: nothing is remembered of it


class Event(Enum):
    ROOM = auto()
    READY = auto()
    REFUSED = auto()  # the sender failed; nothing follows
    ALL_ARRIVED = auto()
    CORRUPT = auto()  # checksum, size or page numbers are wrong
    COPIED = auto()  # the engine thread has copied staging into pages
    LINK_DOWN = auto()
    CANCELLED = auto()  # the request went away
    DEADLINE = auto()
    DRAINED = auto()


class Do(Enum):
    SEND_OFFER = auto()
    SEND_DONE = auto()
    SEND_ABORT = auto()
    HAND_TO_ENGINE = auto()
    REPORT_FAILED = auto()  # the engine recomputes, or frees, as it sees fit
    START_DRAIN_TIMER = auto()
    CLOSE_LINK = auto()
    RELEASE_STAGING = auto()


S, E = State, Event
_LOST = (S.CLOSED, (Do.REPORT_FAILED, Do.RELEASE_STAGING))
_GIVE_UP = (S.DRAINING, (Do.SEND_ABORT, Do.REPORT_FAILED, Do.START_DRAIN_TIMER))
_UNASKED = (S.CLOSED, (Do.SEND_ABORT, Do.REPORT_FAILED, Do.RELEASE_STAGING))
_QUIET = (S.CLOSED, (Do.RELEASE_STAGING,))

TABLE: Final[Mapping[tuple[State, Event], tuple[State, tuple[Do, ...]]]] = {
    (S.QUEUED, E.ROOM): (S.OFFERED, (Do.SEND_OFFER,)),
    (S.QUEUED, E.CANCELLED): _UNASKED,
    (S.QUEUED, E.DEADLINE): _UNASKED,
    (S.QUEUED, E.CORRUPT): _UNASKED,
    (S.QUEUED, E.REFUSED): _LOST,
    (S.QUEUED, E.LINK_DOWN): _LOST,
    (S.OFFERED, E.READY): (S.RECEIVING, ()),
    (S.OFFERED, E.REFUSED): _LOST,
    (S.OFFERED, E.CORRUPT): _GIVE_UP,
    (S.OFFERED, E.LINK_DOWN): _LOST,
    (S.OFFERED, E.CANCELLED): _GIVE_UP,
    (S.OFFERED, E.DEADLINE): _GIVE_UP,
    (S.RECEIVING, E.REFUSED): _LOST,
    (S.RECEIVING, E.ALL_ARRIVED): (S.ARRIVED, (Do.HAND_TO_ENGINE,)),
    (S.RECEIVING, E.CORRUPT): _GIVE_UP,
    (S.RECEIVING, E.LINK_DOWN): _LOST,
    (S.RECEIVING, E.CANCELLED): _GIVE_UP,
    (S.RECEIVING, E.DEADLINE): _GIVE_UP,
    # Everything is here: only the engine thread can end this state, and it never waits for a peer.
    (S.ARRIVED, E.COPIED): (S.CLOSED, (Do.SEND_DONE, Do.RELEASE_STAGING)),
    (S.ARRIVED, E.CANCELLED): (S.CLOSED, (Do.SEND_DONE, Do.REPORT_FAILED, Do.RELEASE_STAGING)),
    (S.ARRIVED, E.REFUSED): (S.ARRIVED, ()),
    (S.ARRIVED, E.LINK_DOWN): (S.ARRIVED, ()),
    (S.ARRIVED, E.CORRUPT): (S.ARRIVED, ()),
    (S.ARRIVED, E.DEADLINE): (S.ARRIVED, ()),
    (S.DRAINING, E.DRAINED): _QUIET,
    (S.DRAINING, E.REFUSED): _QUIET,
    (S.DRAINING, E.LINK_DOWN): _QUIET,
    (S.DRAINING, E.DEADLINE): (S.CLOSED, (Do.RELEASE_STAGING, Do.CLOSE_LINK)),
    (S.DRAINING, E.READY): (S.DRAINING, ()),
    (S.DRAINING, E.ALL_ARRIVED): (S.DRAINING, ()),
    (S.DRAINING, E.CORRUPT): (S.DRAINING, ()),
    (S.DRAINING, E.CANCELLED): (S.DRAINING, ()),
}
