"""Framing of server-sent events."""

from collections.abc import Callable
from typing import Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
encode: Final = msgspec.json.Encoder().encode
_MARK: Final = "\x00text\x00"
"""No name of ours holds a control character."""


def frame(data: object) -> bytes:
    """One event on one line, ending in the blank line that makes clients deliver it."""
    return b"data: " + encode(data) + b"\n\n"


class TextFrames:
    """Events that differ in one text only: what surrounds it is encoded once."""

    def __init__(self, data_with: Callable[[str], object]) -> None:
        """
        Args:
            data_with: the event's data with this text, which occurs in it once.
        """
        self._before, self._after = frame(data_with(_MARK)).split(encode(_MARK))

    def frame(self, text: str) -> bytes:
        return b"".join((self._before, encode(text), self._after))
