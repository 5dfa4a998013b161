"""Prefill side of transfers: matches announcements with offers, ships completed pages, frees them.

All methods run on the courier's thread, except `wanted`, `ship` and `take_closed`, which the engine
thread calls.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.api.handoff import Ticket
from kv_transfer.api.log_fields import traced
from kv_transfer.api.page import Layout, Scales
from kv_transfer.codec import misfit
from kv_transfer.connector.send_records import Lane, Over, Send, Unwanted
from kv_transfer.connector.wire import Later, SenderWire
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.send_session import TABLE, Do, Event, State
from kv_transfer.protocol.table import step
from kv_transfer.transport.lane import Fence, SendJob

log = logging.getLogger(__name__)

MOST_PARKED: Final = 4096
"""Offers that wait for their announcements. A gateway announces at once: so many are no accident."""
LINKS_REMEMBERED: Final = 64
"""Links that were lost: an offer made before the loss must not revive them."""


@dataclass(frozen=True, slots=True)
class Want:
    """Logical pages that a peer has asked for."""

    first_page: int
    pages: int
    layout: Layout
    """What they are to be made into."""
    scales: Scales


class Sender:
    def __init__(
        self,
        *,
        engine_id: str,
        contract: Contract,
        layout: Layout,
        scales: Scales = (),
        wire: SenderWire,
        later: Later,
        park_s: float,
        staging_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """`park_s`: longest that an offer waits for its announcement."""
        self._engine_id, self._contract, self._scales = engine_id, contract, scales
        self._layout, self._wire, self._later, self._now = layout, wire, later, now
        self._park_s, self._staging_bytes = park_s, staging_bytes
        self._sends: dict[str, Send] = {}
        self._unwanted: dict[str, Unwanted] = {}
        self._over: dict[str, Over] = {}
        self._lanes: dict[str, Lane] = {}
        self._lost_links: deque[str] = deque(maxlen=LINKS_REMEMBERED)
        self._lock = threading.Lock()
        self._wanted: dict[str, Want] = {}
        self._staged_bytes = 0
        self._closed: list[str] = []
        self._stale_offers = 0
        self.news = threading.Event()
        """Set when `take_closed` or `wanted` may have something new."""

    # -- engine thread

    def wanted(self) -> dict[str, Want]:
        """Transfers whose pages may be gathered now; empty while enough bytes wait for the wire."""
        with self._lock:
            return dict(self._wanted) if self._staged_bytes < self._staging_bytes else {}

    def ship(self, transfer_id: str, first_page: int, pages: int, data: torch.Tensor, fence: Fence) -> None:
        """Hand encoded pages to the wire. They follow the pages shipped before."""
        with self._lock:
            self._staged_bytes += data.numel()
        self._later(lambda: self._ship(transfer_id, first_page, pages, data, fence))

    def take_closed(self) -> list[str]:
        """Transfers that ended since the last call: their pages are no longer needed."""
        with self._lock:
            self.news.clear()
            closed, self._closed = self._closed, []
        return closed

    def take_stale_offers(self) -> int:
        """Offers since the last call that were meant for an earlier start of this engine."""
        with self._lock:
            count, self._stale_offers = self._stale_offers, 0
        return count

    # -- courier thread

    def in_flight(self) -> int:
        return len(self._sends)

    def announce(self, ticket: Ticket) -> None:
        transfer_id = ticket.transfer_id
        send = self._sends.get(transfer_id)
        if send is None:
            due = self._now() + ticket.deadline_s
            self._sends[transfer_id] = Send(transfer_id, due, State.ANNOUNCED, ticket.peer_engine)
            self._over.pop(transfer_id, None)
            unwanted = self._unwanted.pop(transfer_id, None)
            if unwanted is not None and unwanted.engine_id in ("", ticket.peer_engine):
                self._on(transfer_id, Event.ABORT)
            return
        if send.state is not State.PARKED:
            log.error("transfer announced twice, ignored", extra={"transfer": transfer_id})
            return
        send.peer_engine = ticket.peer_engine
        send.due = self._now() + ticket.deadline_s
        self._match(send, Event.ANNOUNCE)

    def gone(self, transfer_id: str) -> None:
        """The request ended without completing its pages, which now belong to others."""
        self._give_up(transfer_id, Event.GONE, TransferCause.PREFILL_ENDED)

    def stale(self, transfer_id: str) -> None:
        """Pages that were to be shipped have changed hands."""
        self._give_up(transfer_id, Event.GONE, TransferCause.STALE_TRANSFER)

    def nonfinite(self, transfer_id: str) -> None:
        """Pages that were to be converted hold no numbers."""
        self._give_up(transfer_id, Event.GONE, TransferCause.NONFINITE_SOURCE)

    def release(self, transfer_id: str) -> None:
        """Nobody will fetch this transfer any more, whether it is announced already or not."""
        if transfer_id in self._sends:
            self._give_up(transfer_id, Event.GONE, TransferCause.CANCELLED)
        elif transfer_id not in self._over:
            self._unwanted[transfer_id] = Unwanted("", self._now() + self._park_s)

    def routes(self) -> set[bytes]:
        """Peers that something is held or open for."""
        held = {send.route for send in self._sends.values() if send.route}
        return held | {entry.route for entry in self._lanes.values()}

    def peer_lost(self, route: bytes) -> None:
        """The worker there is gone: nobody fetches what was promised to it."""
        for link_id in [link_id for link_id, entry in self._lanes.items() if entry.route == route]:
            self._down(link_id, TransferError(TransferCause.LINK_DOWN, "the peer is gone"))
        for transfer_id, send in list(self._sends.items()):
            if send.route == route:
                self._give_up(transfer_id, Event.LINK_DOWN, TransferCause.LINK_DOWN)

    def on_message(self, route: bytes, message: m.ToSender) -> None:
        match message:
            case m.Offer():
                self._on_offer(route, message)
            case m.Done():
                self._on_done(route, message)
            case m.Abort():
                self._on_abort(route, message)
            case m.Release():
                self.release(message.transfer_id)
            case m.CountRequest():
                pass

    def tick(self) -> None:
        now = self._now()
        for transfer_id, send in list(self._sends.items()):
            if now >= send.due:
                cause = (
                    TransferCause.UNKNOWN_TRANSFER if send.state is State.PARKED else TransferCause.DEADLINE
                )
                self._give_up(transfer_id, Event.DEADLINE, cause)
        for remembered in (self._unwanted, self._over):
            for transfer_id in [key for key, entry in remembered.items() if now >= entry.due]:
                del remembered[transfer_id]

    def close(self) -> None:
        for entry in self._lanes.values():
            entry.lane.close()
        self._lanes.clear()

    def _on_offer(self, route: bytes, offer: m.Offer) -> None:
        transfer_id = offer.transfer_id
        send = self._sends.get(transfer_id)
        if offer.version != m.VERSION:
            detail = f"protocol version {offer.version}, here {m.VERSION}"
            self._refuse(route, offer, TransferCause.PROTOCOL, detail)
        elif offer.to_engine != self._engine_id:
            with self._lock:
                self._stale_offers += 1
            self._refuse(
                route, offer, TransferCause.STALE_TRANSFER, "meant for an earlier start of the engine"
            )
        elif offer.pages < 1 or offer.first_page < 0:
            self._refuse(route, offer, TransferCause.PROTOCOL, "no pages asked for")
        elif send is None and transfer_id in self._over:
            self._refuse(route, offer, self._over[transfer_id].cause, "it is over")
        elif send is None and self._parked() >= MOST_PARKED:
            self._refuse(route, offer, TransferCause.UNKNOWN_TRANSFER, "too many offers wait")
        elif send is None:
            due = self._now() + self._park_s
            self._sends[transfer_id] = Send(transfer_id, due, State.PARKED, offer=offer, route=route)
        elif send.offer is not None or send.state is not State.ANNOUNCED:
            # One offer is accepted per transfer: a second one is a replay or somebody else's guess.
            self._refuse(route, offer, TransferCause.PROTOCOL, "offered before")
        else:
            send.offer, send.route = offer, route
            self._match(send, Event.OFFER)

    def _parked(self) -> int:
        return sum(send.state is State.PARKED for send in self._sends.values())

    def _match(self, send: Send, event: Event) -> None:
        """Announcement and offer are both known: do they fit?"""
        offer = send.offer
        assert offer is not None
        if offer.engine_id != send.peer_engine:
            send.cause, send.detail = TransferCause.FOREIGN_PEER, ""
            self._on(send.transfer_id, Event.MISFIT)
        elif apart := self._contract.disagreement(offer.contract, ours="prefill", theirs="decode"):
            send.cause, send.detail = TransferCause.CONTRACT_MISMATCH, apart
            self._on(send.transfer_id, Event.MISFIT)
        elif difference := misfit(self._layout, offer.layout, offer.scales, self._scales):
            send.cause, send.detail = TransferCause.LAYOUT_MISMATCH, difference
            self._on(send.transfer_id, Event.MISFIT)
        elif offer.link.link_id in self._lost_links:
            send.cause, send.detail = TransferCause.LINK_DOWN, ""
            self._on(send.transfer_id, Event.MISFIT)
        else:
            # Not before: whoever was not announced opens nothing here.
            self._ensure_lane(send.route, offer.link)
            self._on(send.transfer_id, event)

    def _on_done(self, route: bytes, done: m.Done) -> None:
        send = self._sends.get(done.transfer_id)
        if send is None or send.route != route or send.offer is None:
            return
        all_shipped = send.state is State.SENDING and send.shipped_pages == send.offer.pages
        if not all_shipped and send.state is not State.FLUSHED:
            log.warning("done before everything was shipped, ignored", extra={"transfer": done.transfer_id})
            return
        self._on(done.transfer_id, Event.DONE)

    def _on_abort(self, route: bytes, abort: m.Abort) -> None:
        transfer_id = abort.transfer_id
        send = self._sends.get(transfer_id)
        if send is None:
            # Either it is over, or its announcement is still on the way.
            self._unwanted[transfer_id] = Unwanted(abort.engine_id, self._now() + self._park_s)
            self._wire.tell_receiver(route, m.Drained(transfer_id=transfer_id))
            return
        expected = send.peer_engine or (send.offer.engine_id if send.offer else "")
        if abort.engine_id != expected:
            log.warning("abort by a stranger ignored", extra={"transfer": transfer_id})
            return
        send.route = route
        send.cause = TransferCause.CANCELLED
        self._on(transfer_id, Event.ABORT)

    def _ship(self, transfer_id: str, first_page: int, pages: int, data: torch.Tensor, fence: Fence) -> None:
        send = self._sends.get(transfer_id)
        entry = self._lanes.get(send.offer.link.link_id) if send and send.offer else None
        if send is None or entry is None or send.state is not State.SENDING:
            self._unstage(data)
            return
        assert send.offer is not None
        send.on_wire += 1
        send.shipped_pages += pages
        last = send.shipped_pages == send.offer.pages
        route = send.route

        def starting(checksum: int) -> None:
            header = m.Sent(
                transfer_id=transfer_id,
                first_page=first_page,
                pages=pages,
                wire_bytes=data.numel(),
                checksum=checksum,
            )
            self._later(lambda: self._wire.tell_receiver(route, header))

        def ended(error: TransferError | None) -> None:
            self._later(lambda: self._sent(transfer_id, data, last, error))

        entry.lane.submit(SendJob(data, fence, starting, ended))

    def _sent(self, transfer_id: str, data: torch.Tensor, last: bool, error: TransferError | None) -> None:
        self._unstage(data)
        send = self._sends.get(transfer_id)
        if send is None:
            return
        send.on_wire -= 1
        if error is None and last:
            self._on(transfer_id, Event.LAST_SENT)
        self._if_quiet(transfer_id)

    def _if_quiet(self, transfer_id: str) -> None:
        send = self._sends.get(transfer_id)
        if send is not None and send.state is State.STOPPING and send.on_wire == 0:
            self._on(transfer_id, Event.QUIET)

    def _unstage(self, data: torch.Tensor) -> None:
        with self._lock:
            self._staged_bytes -= data.numel()
            self.news.set()

    def _ensure_lane(self, route: bytes, link: m.LinkAddress) -> None:
        link_id = link.link_id
        if link_id not in self._lanes:
            lane = self._wire.join_lane(link, lambda error: self._later(lambda: self._down(link_id, error)))
            self._lanes[link_id] = Lane(lane, route)

    def _down(self, link_id: str, error: TransferError) -> None:
        entry = self._lanes.pop(link_id, None)
        if entry is None:
            return
        self._lost_links.append(link_id)
        log.info("link down", extra={"link": link_id, "cause": str(error)})
        entry.lane.close()
        for transfer_id, send in list(self._sends.items()):
            if send.offer is not None and send.offer.link.link_id == link_id:
                self._give_up(transfer_id, Event.LINK_DOWN, TransferCause.LINK_DOWN)

    def _give_up(self, transfer_id: str, event: Event, cause: TransferCause) -> None:
        send = self._sends.get(transfer_id)
        if send is not None:
            send.cause = cause
            self._on(transfer_id, event)
            self._if_quiet(transfer_id)

    def _refuse(self, route: bytes, offer: m.Offer, cause: TransferCause, detail: str) -> None:
        self._tell_failed(route, offer.transfer_id, cause, detail, offer.traceparent)

    def _tell_failed(
        self, route: bytes, transfer_id: str, cause: TransferCause, detail: str, traceparent: str
    ) -> None:
        log.warning(
            "offer refused",
            extra={"transfer": transfer_id, "cause": cause, "detail": detail, **traced(traceparent)},
        )
        self._wire.tell_receiver(route, m.Failed(transfer_id=transfer_id, cause=cause, detail=detail))

    def _on(self, transfer_id: str, event: Event) -> None:
        send = self._sends[transfer_id]
        send.state, actions = step(TABLE, send.state, event)
        for action in actions:
            self._do(action, send)
        if send.state is not State.SENDING:
            with self._lock:
                self._wanted.pop(transfer_id, None)
        if send.state is State.CLOSED:
            del self._sends[transfer_id]
            if send.peer_engine:
                self._over[transfer_id] = Over(send.cause, self._now() + self._park_s)
        else:
            self._if_quiet(transfer_id)

    def _do(self, action: Do, send: Send) -> None:
        match action:
            case Do.SEND_READY:
                assert send.offer is not None
                offer = send.offer
                ready = m.Ready(transfer_id=send.transfer_id, layout=offer.layout, pages=offer.pages)
                self._wire.tell_receiver(send.route, ready)
                with self._lock:
                    self._wanted[send.transfer_id] = Want(
                        offer.first_page, offer.pages, offer.layout, offer.scales
                    )
                    self.news.set()
            case Do.SEND_FAILED:
                traceparent = "" if send.offer is None else send.offer.traceparent
                self._tell_failed(send.route, send.transfer_id, send.cause, send.detail, traceparent)
            case Do.SEND_DRAINED:
                self._wire.tell_receiver(send.route, m.Drained(transfer_id=send.transfer_id))
            case Do.RELEASE_PAGES:
                with self._lock:
                    self._closed.append(send.transfer_id)
                    self.news.set()
