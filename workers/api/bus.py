"""The token bus frame: one per engine step and gateway, all requests of the step batched.

Tokens are numbered. A receiver accepts an item only when `first_index` is what it has so far; a gap is
refetched. Encoded as MessagePack arrays.
"""

from typing import Final

import msgspec

from kv_transfer.api import HandoffReport
from workers.api.stats import FinishReason

BUS_VERSION: Final = 1


class Item(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    request_id: str
    attempt: int
    first_index: int
    """Index of the first token of this item within the request's output."""
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    """Set on the last item only."""
    handoff: HandoffReport | None = None
    """How the prompt's pages came; on the first item, where the engine tells it."""


class IntegrityCounts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine has checked since its start: numbers only, of all its requests together."""

    steps_checked: int = 0
    steps_unchecked: int = 0
    """Steps that computed something with their tables unchecked."""
    pages_checked: int = 0
    mismatches: dict[str, int] = {}
    """By cause: see `kv_transfer.api.IntegrityCause`."""


class Gauges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    free_pages: int
    running: int
    waiting: int
    integrity: IntegrityCounts = IntegrityCounts()


class Frame(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A frame without items is a heartbeat: at least one a second goes to every attached gateway."""

    version: int
    engine_id: str
    items: tuple[Item, ...]
    gauges: Gauges | None = None
    """On heartbeats."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_item_decoder = msgspec.msgpack.Decoder(Item)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """The frame in `data`.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not a frame.
    """
    return _decoder.decode(data)


def encode_item(item: Item) -> bytes:
    """One item by itself: where something else than the bus carries it."""
    return _encoder.encode(item)


def decode_item(data: bytes) -> Item:
    """
    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not an item.
    """
    return _item_decoder.decode(data)
