"""Control messages between a decode worker (the receiver) and a prefill worker (the sender).

Page bytes never travel here: they go over the link, in the order in which `Sent` announces them.

    decode                                   prefill
      | Offer (what I miss, and where to meet)  |
      |---------------------------------------->|  parked until the gateway's call announces the transfer
      |                Ready (or Failed)        |
      |<----------------------------------------|
      |       Sent + bytes on the link, n times |
      |<========================================|
      | Done                                    |
      |---------------------------------------->|  pages are released
      | Abort, at any time                      |
      |---------------------------------------->|
      |                Drained                  |
      |<----------------------------------------|  nothing of this transfer is on the wire any more
"""

from typing import Final, Literal

import msgspec

from kv_transfer.api.contract import Contract
from kv_transfer.api.errors import TransferCause
from kv_transfer.api.page import Layout, Scales

VERSION: Final = 4
"""Raised with any change to these messages or to the order of bytes on the link.

1 (2026-11-30): first form.
2 (2026-11-30): an offer names the engine that it is meant for.
3 (2026-11-30): an offer's layout is what the pages are to be made into, with these scales.
4 (2026-11-30): an offer tells the contract of its engine.
"""


class LinkAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two workers meet to build their 2-rank group. A rebuilt link has a new `link_id`."""

    link_id: str
    host: str
    port: int
    backend: Literal["gloo", "nccl"]


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """I miss these pages of this transfer. Page numbers are logical: 0 is the first page of the prompt."""

    version: int
    transfer_id: str
    engine_id: str
    to_engine: str
    """Of the start of the sender's engine that the ticket was made for: a later one has other pages."""
    contract: Contract = Contract()
    """Of my engine."""
    layout: Layout
    """Of my cache: what the pages are to be made into."""
    scales: Scales = ()
    """Of my cache, by layer."""
    first_page: int
    pages: int
    link: LinkAddress
    traceparent: str = ""
    """W3C trace context of the request, for the sender's log lines."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The offer is accepted; what follows has this layout (the manifest of the transfer)."""

    transfer_id: str
    layout: Layout
    pages: int


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag="sent"):
    """The next `wire_bytes` on the link are these pages: per page all layers, in the sender's page order."""

    transfer_id: str
    first_page: int
    pages: int
    wire_bytes: int
    checksum: int
    """xxh3-64 over the encoded bytes."""


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    transfer_id: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The sender gave up. Nothing of this transfer follows on the link."""

    transfer_id: str
    cause: TransferCause
    detail: str = ""


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The receiver does not want the pages (any more)."""

    transfer_id: str
    engine_id: str


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag="drained"):
    """Nothing of an aborted transfer is on the link any more, nor will be."""

    transfer_id: str


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The request that this transfer was for has ended, and nobody will fetch its pages.

    Said by the worker's own engine process, on the gateway's order.
    """

    transfer_id: str


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Sent now and then to every peer that pages are held for: one that is gone cannot be sent to."""


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Asked by the worker's own engine process for its gauges."""


class Count(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    in_flight: int
    malformed: int = 0
    """Messages since the worker's start that were none."""
    strangers: int = 0
    """Connections since the worker's start that were refused."""


ToSender = Offer | Done | Abort | Release | CountRequest
ToReceiver = Ready | Sent | Failed | Drained | Alive | Count

_encoder = msgspec.msgpack.Encoder()
_to_sender = msgspec.msgpack.Decoder(ToSender)
_to_receiver = msgspec.msgpack.Decoder(ToReceiver)


def encode(message: ToSender | ToReceiver) -> bytes:
    return _encoder.encode(message)


def decode_to_sender(data: bytes) -> ToSender:
    """Raises msgspec.DecodeError (ValidationError is one) for anything that is not such a message."""
    return _to_sender.decode(data)


def decode_to_receiver(data: bytes) -> ToReceiver:
    """Raises msgspec.DecodeError (ValidationError is one) for anything that is not such a message."""
    return _to_receiver.decode(data)
