"""Framing of server-sent events."""

from typing import Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_encode = msgspec.json.Encoder().encode


def frame(data: object) -> bytes:
    """One event on one line, ending in the blank line that makes clients deliver it."""
    return b"data: " + _encode(data) + b"\n\n"
