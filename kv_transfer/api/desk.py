"""What a replica may ask of its engine's process beside inference."""

import msgspec


class AskGauges(msgspec.Struct, frozen=True, kw_only=True, tag="gauges"):
    """Answered with `EngineGauges`, in MessagePack."""


class AskLedger(msgspec.Struct, frozen=True, kw_only=True, tag="ledger"):
    """Answered with `LedgerSnapshot`, in MessagePack."""


class ReleaseTransfer(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Nobody will fetch this transfer's pages any more. Answered with an empty message."""

    transfer_id: str


Question = AskGauges | AskLedger | ReleaseTransfer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Question)


def encode(question: Question) -> bytes:
    return _encoder.encode(question)


def decode(data: bytes) -> Question:
    """Raises msgspec.DecodeError for anything that is not a question."""
    return _decoder.decode(data)
