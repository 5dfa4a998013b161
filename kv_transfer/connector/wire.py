"""What the sender and the receiver may ask of the courier that runs them."""

from collections.abc import Callable
from typing import Protocol

from kv_transfer.api.errors import TransferError
from kv_transfer.protocol.messages import LinkAddress, ToReceiver, ToSender
from kv_transfer.transport.lane import RecvJob, SendJob


class LaneLike(Protocol):
    started: bool

    def start(self) -> None:
        """Build the link; jobs run from then on. Idempotent."""

    def submit(self, job: SendJob | RecvJob) -> None: ...

    def close(self) -> None: ...


class ReceiverWire(Protocol):
    def tell_sender(self, address: str, message: ToSender) -> None:
        """Queue a message to the worker at `address`; never blocks."""

    def open_lane(self, address: str, down: Callable[[TransferError], None]) -> tuple[LaneLike, LinkAddress]:
        """A new lane to the worker at `address`, not started, and where that worker finds the other end."""


class SenderWire(Protocol):
    def tell_receiver(self, route: bytes, message: ToReceiver) -> None:
        """Queue a message to the worker that spoke with this route; never blocks."""

    def join_lane(self, link: LinkAddress, down: Callable[[TransferError], None]) -> LaneLike:
        """The sending end of a lane that a receiver has opened, started."""


Later = Callable[[Callable[[], None]], None]
"""Runs a callable on the courier's thread, soon: how lane threads report back."""
