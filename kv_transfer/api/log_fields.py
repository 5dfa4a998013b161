"""Log lines that say which request they belong to, in every process of the system.

A line has a constant message; what varies are fields. They come from two places: the `extra` of the logging
call, and the request that the emitting task works for.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(process)d %(name)s %(message)s"

_FORMATTED: Final = frozenset({"message", "asctime"})
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_request: ContextVar[Mapping[str, str]] = ContextVar("request_log_fields", default=_NONE)


@contextmanager
def request_fields(request_id: str, trace_id: str = "") -> Iterator[None]:
    """Lines logged inside the block, and by tasks started there, carry these two."""
    fields = {"request_id": request_id} | ({"trace_id": trace_id} if trace_id else {})
    before = _request.set(fields)
    try:
        yield
    finally:
        _request.reset(before)


class FieldFormatter(logging.Formatter):
    """The message, then the record's own fields and its request's as `name=value`.

    A value of the request that the line holds already is not said twice.
    """

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging calls it so
        line = super().formatMessage(record)
        # What a bare record has, too, is no field: libraries mark every record (Ray and vLLM do).
        usual = vars(logging.makeLogRecord({})).keys() | _FORMATTED
        own = {name: value for name, value in vars(record).items() if name not in usual}
        for name, value in own.items():
            line += f" {name}={_quoted(str(value))}"
        for name, text in _request.get().items():
            if name not in own and text not in line:
                line += f" {name}={_quoted(text)}"
        return line


def _quoted(text: str) -> str:
    """One word, or a quoted string on the same line."""
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
