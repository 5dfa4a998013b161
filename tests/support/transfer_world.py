"""A sender and a receiver in one thread: messages, page bytes and time move only when a test says so."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause, TransferError
from kv_transfer.api.handoff import Role, Ticket
from kv_transfer.api.page import Layout, WireFormat
from kv_transfer.connector.metadata import ReceiveOrder
from kv_transfer.connector.receiver import Outcome, Receiver
from kv_transfer.connector.sender import Sender
from kv_transfer.protocol import messages as m
from kv_transfer.transport.lane import Fence, RecvJob, SendJob, checksum

CPU = torch.device("cpu")
LAYOUT = Layout(layers=2, heads=1, block_size=4, content=8, format=WireFormat.FP32, interior="cpu/test")
ADDRESS = "tcp://prefill"
NO_CONTRACT = Contract()


@dataclass
class Wire:
    """Both ends of one lane. Bytes cross when `move` is called."""

    sends: deque[SendJob] = field(default_factory=deque)
    recvs: deque[RecvJob] = field(default_factory=deque)
    down: list[Callable[[TransferError], None]] = field(default_factory=list)
    broken: bool = False
    started: bool = False

    def start(self) -> None:
        self.started = True

    def submit(self, job: SendJob | RecvJob) -> None:
        if isinstance(job, SendJob):
            job.starting(checksum(job.data))
            self.sends.append(job)
        else:
            self.recvs.append(job)

    def move(self, tamper: Callable[[torch.Tensor], None] | None = None) -> bool:
        """One page group crosses, if one was sent and is awaited."""
        if self.broken or not (self.sends and self.recvs):
            return False
        send, recv = self.sends.popleft(), self.recvs.popleft()
        recv.into.copy_(send.data)
        if tamper is not None:
            tamper(recv.into)
        send.ended(None)
        recv.ended(checksum(recv.into), None)
        return True

    def break_down(self) -> None:
        self.broken = True
        error = TransferError(TransferCause.LINK_DOWN, "test")
        for job in self.sends:
            job.ended(error)
        for recv in self.recvs:
            recv.ended(0, error)
        self.sends.clear()
        self.recvs.clear()
        for down in self.down:
            down(error)

    def close(self) -> None:
        self.broken = True


class World:
    """One prefill worker, one decode worker. `settle` delivers everything that is under way."""

    def __init__(
        self,
        *,
        sender_layout: Layout = LAYOUT,
        sender_contract: Contract = NO_CONTRACT,
        receiver_contract: Contract = NO_CONTRACT,
        drain_s: float = 10.0,
        staging_pages: int = 1000,
    ) -> None:
        self.now = 0.0
        self.work: deque[Callable[[], None]] = deque()
        self.to_sender: deque[m.ToSender] = deque()
        self.to_receiver: deque[m.ToReceiver] = deque()
        self.links: dict[str, Wire] = {}
        self.heard_by_receiver: list[m.ToReceiver] = []
        self.heard_by_sender: list[m.ToSender] = []
        self.lose_messages = False
        self.tamper: Callable[[torch.Tensor], None] | None = None
        self.sender = Sender(
            engine_id="prefill",
            contract=sender_contract,
            layout=sender_layout,
            wire=self,
            later=self.work.append,
            park_s=60.0,
            staging_bytes=1 << 20,
            now=lambda: self.now,
        )
        self.receiver = Receiver(
            engine_id="decode",
            rank=0,
            contract=receiver_contract,
            layout=LAYOUT,
            device=CPU,
            wire=self,
            later=self.work.append,
            drain_s=drain_s,
            staging_bytes=staging_pages * LAYOUT.page_bytes,
            now=lambda: self.now,
        )

    # what the sender and the receiver ask for

    def tell_sender(self, address: str, message: m.ToSender) -> None:
        assert address == ADDRESS
        self.to_sender.append(m.decode_to_sender(m.encode(message)))

    def tell_receiver(self, route: bytes, message: m.ToReceiver) -> None:
        self.to_receiver.append(m.decode_to_receiver(m.encode(message)))

    def open_lane(self, address: str, down: Callable[[TransferError], None]) -> tuple[Wire, m.LinkAddress]:
        link = m.LinkAddress(link_id=f"link{len(self.links)}", host="h", port=1, backend="gloo")
        self.links[link.link_id] = Wire(down=[down])
        return self.links[link.link_id], link

    def join_lane(self, link: m.LinkAddress, down: Callable[[TransferError], None]) -> Wire:
        wire = self.links[link.link_id]
        wire.down.append(down)
        return wire

    # what a test does

    def announce(self, transfer_id: str, *, peer: str = "decode", deadline_s: float = 30.0) -> None:
        ticket = Ticket(transfer_id=transfer_id, role=Role.SEND, peer_engine=peer, deadline_s=deadline_s)
        self.sender.announce(ticket)

    def ask(
        self,
        transfer_id: str,
        *,
        pages: int = 3,
        first_page: int = 0,
        deadline_s: float = 30.0,
        to_engine: str = "prefill",
    ) -> None:
        ticket = replace(_receiving(transfer_id, deadline_s), peer_engine=to_engine)
        order = ReceiveOrder(f"request-{transfer_id}", ticket, first_page, tuple(range(10, 10 + pages)))
        self.receiver.begin(order)

    def decline(self, transfer_id: str) -> None:
        self.receiver.decline(_receiving(transfer_id, 30.0))

    def start(self, transfer_id: str, *, pages: int = 3, first_page: int = 0) -> None:
        """Announced, asked for and agreed on: pages may be shipped."""
        self.announce(transfer_id)
        self.ask(transfer_id, pages=pages, first_page=first_page)
        self.settle()

    def ship(self, transfer_id: str, first_page: int, pages: int) -> torch.Tensor:
        """Bytes that no other page of any other transfer has."""
        start = crc32(f"{transfer_id}/{first_page}".encode())
        data = torch.arange(start, start + pages * LAYOUT.page_bytes, dtype=torch.int64) * 2654435761 % 251
        data = data.to(torch.uint8)
        self.sender.ship(transfer_id, first_page, pages, data, Fence(CPU))
        return data

    def carry(self, transfer_id: str) -> torch.Tensor:
        """A whole transfer of one page, from its announcement to the last byte."""
        self.start(transfer_id, pages=1)
        data = self.ship(transfer_id, 0, 1)
        self.settle()
        return data

    def settle(self, *, bytes_move: bool = True) -> None:
        """Deliver messages, queued work and, unless held back, page bytes, until nothing is left."""
        moved = True
        while moved:
            moved = False
            while self.work:
                self.work.popleft()()
                moved = True
            while self.to_sender:
                message = self.to_sender.popleft()
                if not self.lose_messages:
                    self.heard_by_sender.append(message)
                    self.sender.on_message(b"decode-route", message)
                moved = True
            while self.to_receiver:
                answer = self.to_receiver.popleft()
                if not self.lose_messages:
                    self.heard_by_receiver.append(answer)
                    self.receiver.on_message(ADDRESS, answer)
                moved = True
            if bytes_move:
                for wire in self.links.values():
                    moved = wire.move(self.tamper) or moved

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sender.tick()
        self.receiver.tick()
        self.settle()

    def outcomes(self) -> list[Outcome]:
        """What the engine thread finds; it copies at once."""
        ended = self.receiver.take()
        for outcome in ended:
            if outcome.cause is None:
                self.receiver.copied(outcome.order.ticket.transfer_id)
        self.settle()
        return ended

    def quiet(self) -> bool:
        """Nothing is remembered of any transfer."""
        return self.sender.in_flight() == 0 and self.receiver.in_flight() == 0


def _receiving(transfer_id: str, deadline_s: float) -> Ticket:
    return Ticket(
        transfer_id=transfer_id,
        role=Role.RECEIVE,
        peer_engine="prefill",
        peer_addresses=(ADDRESS,),
        deadline_s=deadline_s,
    )
