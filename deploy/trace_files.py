"""Finished spans as JSON lines: one private file for each process, of bounded size.

What is written is what `phasegate trace` reads. A process that has filled its file renames it to `.1`, in
place of the one before, and starts a new one.
"""

import errno
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

PREFIX: Final = "trace-"
MAX_BYTES: Final = 16 * 1024**2
"""Of one file: about 30,000 spans. A process holds at most two of them."""
MAX_FILES: Final = 40
"""Older ones, of replicas that are gone, are removed at the next start."""

Value = str | int | float | bool


class Event(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    at_ns: int
    attributes: dict[str, Value] = {}


class SpanRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished span. Ids in hex, times in Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace."""
    name: str
    process: str
    """`gateway`, `prefill` or `decode`."""
    replica: str
    pid: int
    start_ns: int
    end_ns: int
    error: str = ""
    """The word of what went wrong; empty when nothing did."""
    attributes: dict[str, Value] = {}
    events: tuple[Event, ...] = ()


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(SpanRecord).decode


class SpanFile:
    """Appends records. Owned by one thread of one process."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = self._open()
        self._bytes = self._file.tell()
        self._torn = False

    def write(self, records: list[SpanRecord]) -> None:
        """Raises OSError when the disk does not take them: they are lost then, and no later ones."""
        data = b"".join(_encode(record) + b"\n" for record in records)
        if self._bytes and self._bytes + len(data) > self._max_bytes:
            self._file.close()
            self._path.replace(rotated(self._path))
            self._file, self._bytes = self._open(), 0
        if self._torn:
            data = b"\n" + data  # what was left unfinished is a line of its own, and passed over
        self._torn = True
        written = self._file.write(data)
        self._bytes += written
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        self._file.close()

    def _open(self) -> FileIO:
        # Not buffered: what could not be written once must not hold up what follows.
        return FileIO(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a")


def rotated(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def trace_files(logs: Path) -> list[Path]:
    """Newest first."""
    found = [*logs.glob(f"{PREFIX}*.jsonl"), *logs.glob(f"{PREFIX}*.jsonl.1")]
    return sorted(found, key=_changed, reverse=True)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:  # renamed, or removed, since it was listed
        return 0


def prune(logs: Path, keep: int = MAX_FILES) -> None:
    """Removes all but the newest files."""
    for path in trace_files(logs)[keep:]:
        path.unlink(missing_ok=True)


def read(logs: Path, having: bytes = b"") -> Iterator[SpanRecord]:
    """Every record whose line holds these bytes, of all processes. Damaged lines, as a process that was
    killed leaves them, are passed over."""
    for path in trace_files(logs):
        try:
            with path.open("rb") as file:
                for line in file:
                    if having not in line:
                        continue
                    try:
                        yield _decode(line)
                    except (RecursionError, msgspec.DecodeError):
                        continue
        except FileNotFoundError:
            continue  # renamed meanwhile
