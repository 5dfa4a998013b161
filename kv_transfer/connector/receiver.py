"""Decode side of transfers: asks for pages, collects them in staging, hands them to the engine thread.

All methods run on the courier's thread, except `take`, which the engine thread calls.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.api.handoff import Ticket
from kv_transfer.api.page import Layout, Scales
from kv_transfer.connector.metadata import ReceiveOrder
from kv_transfer.connector.wire import LaneLike, Later, ReceiverWire
from kv_transfer.protocol import messages as m
from kv_transfer.protocol.recv_session import TABLE, Do, Event, State
from kv_transfer.protocol.table import step
from kv_transfer.transport.lane import RecvJob

log = logging.getLogger(__name__)

MOST_STRAY_BYTES = 64 * 2**20
"""More than a sender ever groups: what is announced beyond it is not worth taking off the wire."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Consecutive pages in staging."""

    offset: int
    """Index of the first one within the order's `page_ids`."""
    pages: int
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one receive ended, for the engine thread: `groups` to copy in, or a cause."""

    order: ReceiveOrder
    groups: tuple[PageGroup, ...]
    started_at: float
    cause: TransferCause | None
    detail: str = ""


@dataclass
class _Receive:
    order: ReceiveOrder
    lane_address: str
    started_at: float
    due: float
    state: State = State.QUEUED
    groups: list[PageGroup] = field(default_factory=list)
    announced_pages: int = 0
    arrived_pages: int = 0
    cause: TransferCause = TransferCause.PROTOCOL
    detail: str = ""
    """What the sender said about it."""


@dataclass
class _LaneEntry:
    lane: LaneLike
    link: m.LinkAddress


class Receiver:
    def __init__(
        self,
        *,
        engine_id: str,
        rank: int,
        contract: Contract,
        layout: Layout,
        scales: Scales = (),
        device: torch.device,
        wire: ReceiverWire,
        later: Later,
        drain_s: float,
        staging_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """`staging_bytes`: most bytes of pages that are under way or wait to be copied in."""
        self._engine_id, self._rank, self._layout, self._device = engine_id, rank, layout, device
        self._scales, self._contract = scales, contract
        self._wire, self._later, self._drain_s, self._now = wire, later, drain_s, now
        self._staging_pages = max(1, staging_bytes // layout.page_bytes)
        self._receives: dict[str, _Receive] = {}
        self._lanes: dict[str, _LaneEntry] = {}
        self._ended: list[Outcome] = []
        self._ended_lock = threading.Lock()
        self.news = threading.Event()
        """Set when `take` has something to return."""

    def take(self) -> list[Outcome]:
        """Receives that ended since the last call. Call `copied` for each one with groups."""
        with self._ended_lock:
            self.news.clear()
            ended, self._ended = self._ended, []
        return ended

    def in_flight(self) -> int:
        return len(self._receives)

    def begin(self, order: ReceiveOrder) -> None:
        now = self._now()
        if self._rank >= len(order.ticket.peer_addresses):
            log.error("the peer has fewer ranks", extra={"transfer": order.ticket.transfer_id})
            self._end(Outcome(order, (), now, TransferCause.PROTOCOL))
            return
        address = order.ticket.peer_addresses[self._rank]
        receive = _Receive(order, address, now, now + order.ticket.deadline_s)
        self._receives[order.ticket.transfer_id] = receive
        self._admit()

    def decline(self, ticket: Ticket) -> None:
        """Tell a sender that its pages are not needed, without ever having asked for them."""
        if self._rank < len(ticket.peer_addresses):
            abort = m.Abort(transfer_id=ticket.transfer_id, engine_id=self._engine_id)
            self._wire.tell_sender(ticket.peer_addresses[self._rank], abort)

    def cancel(self, transfer_id: str) -> None:
        self._fail(transfer_id, Event.CANCELLED, TransferCause.CANCELLED)

    def peer_lost(self, address: str) -> None:
        """The worker there is gone, and whatever it had still to send."""
        self._forget_lane(address, TransferCause.LINK_DOWN)
        for transfer_id, receive in list(self._receives.items()):
            if receive.lane_address == address:
                self._fail(transfer_id, Event.LINK_DOWN, TransferCause.LINK_DOWN)

    def copied(self, transfer_id: str) -> None:
        self._on(transfer_id, Event.COPIED)

    def on_message(self, address: str, message: m.ToReceiver) -> None:
        match message:
            case m.Ready():
                self._on_ready(message)
            case m.Sent():
                self._on_sent(address, message)
            case m.Failed():
                log.warning(
                    "transfer refused",
                    extra={"transfer": message.transfer_id, "cause": message.cause, "detail": message.detail},
                )
                self._fail(message.transfer_id, Event.REFUSED, message.cause, message.detail)
                if message.cause is TransferCause.LINK_DOWN:
                    # Lost at the other end only: the next transfer needs a new one.
                    self._forget_lane(address, message.cause)
            case m.Drained():
                self._on(message.transfer_id, Event.DRAINED)
            case m.Alive() | m.Count():
                pass

    def tick(self) -> None:
        now = self._now()
        for transfer_id, receive in list(self._receives.items()):
            if now >= receive.due:
                self._fail(transfer_id, Event.DEADLINE, TransferCause.DEADLINE)

    def close(self) -> None:
        for entry in self._lanes.values():
            entry.lane.close()
        self._lanes.clear()

    def _admit(self) -> None:
        """Offer what waits, in order of arrival, as far as there is room. One always fits."""
        taken = sum(len(r.order.page_ids) for r in self._receives.values() if r.state is not State.QUEUED)
        for transfer_id, receive in list(self._receives.items()):
            if receive.state is not State.QUEUED:
                continue
            if taken and taken + len(receive.order.page_ids) > self._staging_pages:
                return
            taken += len(receive.order.page_ids)
            self._on(transfer_id, Event.ROOM)

    def _offer(self, receive: _Receive) -> None:
        order, address = receive.order, receive.lane_address
        entry = self._lanes.get(address)
        if entry is None:
            lane, link = self._wire.open_lane(
                address, lambda error: self._later(lambda: self._down(address, link, error))
            )
            entry = self._lanes[address] = _LaneEntry(lane, link)
        self._wire.tell_sender(
            address,
            m.Offer(
                version=m.VERSION,
                transfer_id=order.ticket.transfer_id,
                engine_id=self._engine_id,
                to_engine=order.ticket.peer_engine,
                contract=self._contract,
                layout=self._layout,
                scales=self._scales,
                first_page=order.first_page,
                pages=len(order.page_ids),
                link=entry.link,
                traceparent=order.ticket.traceparent,
            ),
        )

    def _on_ready(self, message: m.Ready) -> None:
        if difference := self._layout.difference(message.layout):
            log.error("layouts differ", extra={"transfer": message.transfer_id, "difference": difference})
            self._fail(message.transfer_id, Event.CORRUPT, TransferCause.LAYOUT_MISMATCH)
        else:
            receive = self._receives.get(message.transfer_id)
            entry = self._lanes.get(receive.lane_address) if receive is not None else None
            if entry is not None:
                # Not before: an offer may be parked for longer than building a link may take.
                entry.lane.start()
            self._on(message.transfer_id, Event.READY)

    def _on_sent(self, address: str, message: m.Sent) -> None:
        """Post the receive, wanted or not: the bytes are on the wire and must be taken off it."""
        entry = self._lanes.get(address)
        if entry is None or not entry.lane.started:
            return  # the link is gone, and the bytes with it; or there never was one
        link = entry.link
        receive = self._receives.get(message.transfer_id)
        fits = receive is not None and self._fits(receive, message)
        if not fits and not 0 < message.wire_bytes <= max(self._layout.page_bytes, MOST_STRAY_BYTES):
            self._close_lane(address, f"{message.wire_bytes} bytes announced that nobody waits for")
            return
        staging = torch.empty(message.wire_bytes, dtype=torch.uint8, device=self._device)
        if fits:
            assert receive is not None
            receive.announced_pages += message.pages

        def ended(found: int, error: TransferError | None) -> None:
            if error is None:
                self._later(lambda: self._arrived(link, message, staging, found))

        entry.lane.submit(RecvJob(staging, ended))
        if receive is not None and not fits:
            self._fail(message.transfer_id, Event.CORRUPT, TransferCause.PROTOCOL)

    def _fits(self, receive: _Receive, message: m.Sent) -> bool:
        expected_next = receive.order.first_page + receive.announced_pages
        return (
            receive.state in (State.RECEIVING, State.DRAINING)
            and message.first_page == expected_next
            and 0 < message.pages <= len(receive.order.page_ids) - receive.announced_pages
            and message.wire_bytes == message.pages * self._layout.page_bytes
        )

    def _arrived(self, link: m.LinkAddress, message: m.Sent, staging: torch.Tensor, found: int) -> None:
        receive = self._receives.get(message.transfer_id)
        if receive is None or receive.state is not State.RECEIVING:
            return
        if found != message.checksum:
            log.error("checksum differs", extra={"transfer": message.transfer_id, "link": link.link_id})
            self._fail(message.transfer_id, Event.CORRUPT, TransferCause.CHECKSUM)
            # The two ends may have lost step, and then every later page would be another's.
            self._close_lane(receive.lane_address, "bytes were not what was announced")
            return
        receive.groups.append(
            PageGroup(message.first_page - receive.order.first_page, message.pages, staging)
        )
        receive.arrived_pages += message.pages
        if receive.arrived_pages == len(receive.order.page_ids):
            self._on(message.transfer_id, Event.ALL_ARRIVED)

    def _down(self, address: str, link: m.LinkAddress, error: TransferError) -> None:
        entry = self._lanes.get(address)
        if entry is None or entry.link != link:
            return  # an older link of the same pair
        log.warning("link down", extra={"peer": address, "link": link.link_id, "cause": str(error)})
        self._forget_lane(address, error.cause)

    def _close_lane(self, address: str, why: str) -> None:
        log.error("link given up", extra={"peer": address, "why": why})
        self._forget_lane(address, TransferCause.PROTOCOL)

    def _forget_lane(self, address: str, cause: TransferCause) -> None:
        entry = self._lanes.pop(address, None)
        if entry is None:
            return
        entry.lane.close()
        for transfer_id, receive in list(self._receives.items()):
            if receive.lane_address == address:
                self._fail(transfer_id, Event.LINK_DOWN, cause)

    def _fail(self, transfer_id: str, event: Event, cause: TransferCause, detail: str = "") -> None:
        receive = self._receives.get(transfer_id)
        if receive is not None:
            if receive.state in (State.QUEUED, State.OFFERED, State.RECEIVING, State.ARRIVED):
                receive.cause, receive.detail = cause, detail
            self._on(transfer_id, event)

    def _on(self, transfer_id: str, event: Event) -> None:
        receive = self._receives.get(transfer_id)
        if receive is None:
            return  # closed: late news about it is normal
        in_turn = {Event.READY: State.OFFERED, Event.DRAINED: State.DRAINING}.get(event, receive.state)
        if receive.state not in (in_turn, State.DRAINING):
            event = Event.CORRUPT
        receive.state, actions = step(TABLE, receive.state, event)
        for action in actions:
            self._do(action, receive)

    def _do(self, action: Do, receive: _Receive) -> None:
        transfer_id = receive.order.ticket.transfer_id
        match action:
            case Do.SEND_OFFER:
                self._offer(receive)
            case Do.SEND_DONE:
                self._wire.tell_sender(receive.lane_address, m.Done(transfer_id=transfer_id))
            case Do.SEND_ABORT:
                abort = m.Abort(transfer_id=transfer_id, engine_id=self._engine_id)
                self._wire.tell_sender(receive.lane_address, abort)
            case Do.HAND_TO_ENGINE:
                self._end(Outcome(receive.order, tuple(receive.groups), receive.started_at, None))
            case Do.REPORT_FAILED:
                self._end(Outcome(receive.order, (), receive.started_at, receive.cause, receive.detail))
            case Do.START_DRAIN_TIMER:
                receive.due = self._now() + self._drain_s
            case Do.CLOSE_LINK:
                self._close_lane(receive.lane_address, "an aborted transfer was never confirmed as drained")
            case Do.RELEASE_STAGING:
                receive.groups.clear()
                self._receives.pop(transfer_id, None)
                self._later(self._admit)

    def _end(self, outcome: Outcome) -> None:
        with self._ended_lock:
            self._ended.append(outcome)
            self.news.set()
