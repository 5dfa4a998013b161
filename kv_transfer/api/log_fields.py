"""Log lines that say which request they belong to, in every process of the system.

A line has a constant message; what varies are fields. They come from two places: the `extra` of the logging
call, and the request that the emitting task works for.
"""

import logging
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final

FORMAT: Final = "%(asctime)s %(levelname)s %(process)d %(name)s %(message)s"

ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

MAX_BYTES: Final = 16 * 1024**2
"""Of one log file."""

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


def traced(traceparent: str) -> dict[str, str]:
    """The field `trace_id` of a W3C trace context; none where there is none."""
    parts = traceparent.split("-")
    return {"trace_id": parts[1]} if len(parts) > 1 else {}


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

    def formatException(self, ei: ExceptionInfo) -> str:  # noqa: N802 - logging calls it so
        """Of a request's exception where and what it was: its own text may hold the request's."""
        if not _request.get() or ei[1] is None:
            return super().formatException(ei)
        error: BaseException | None = ei[1]
        told: set[int] = set()
        lines: list[str] = []
        while error is not None and id(error) not in told:
            told.add(id(error))
            lines = [*traceback.format_tb(error.__traceback__), type(error).__qualname__, "\n", *lines]
            error = error.__cause__ or error.__context__
        return "".join(lines).rstrip()


class PrivateLog(RotatingFileHandler):
    """A log file for its owner only. At `max_bytes` it becomes `NAME.1`, in place of the one before.

    A full disk costs log lines, never a request.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1)
        self.setFormatter(FieldFormatter())

    def _open(self) -> TextIOWrapper:
        handle = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(handle, "a")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging calls it so
        """The line is lost, for want of room or of its folder. There is nowhere to say so."""


def _quoted(text: str) -> str:
    """One word, or a quoted string on the same line."""
    if text and text.isprintable() and not any(c in text for c in ' "='):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
