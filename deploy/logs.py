"""One log format for every process of the system: time, level, logger, a constant message, then fields.

All logs together stay bounded: replicas rotate their own file, the supervisor cuts what others write, and old
files go. A disk that is full costs log lines, never a request.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Final, TextIO

from kv_transfer.api import FieldFormatter, PrivateLog

OURS: Final = ("gateway", "workers", "kv_transfer", "deploy")
MOST_BYTES: Final = 16 * 1024**2
"""Of one log file; then it becomes `NAME.1` in place of the one before."""
MOST_FILES: Final = 40
"""Of replicas, old ones included: a replica that is replaced leaves its file."""


def log_to_file(path: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """From now on this process's log lines, ours from INFO and others' from WARNING, go to a private file."""
    handler = PrivateLog(path, most_bytes)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)


def log_to_stream(stream: TextIO) -> None:
    """Warnings of this process go to the person at the terminal."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FieldFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def keep_bounded(folder: Path, *, most_bytes: int = MOST_BYTES, most_files: int = MOST_FILES) -> None:
    """Cuts files that other programs append to, and removes the oldest files of replicas.

    What is cut off is kept as `NAME.1`, if there is room for it.
    """
    for name in ("supervisor.log", "redis.log"):
        file = folder / name
        if _size(file) > most_bytes:
            try:
                shutil.copy(file, file.with_name(f"{name}.1"))
            except OSError:
                file.with_name(f"{name}.1").unlink(missing_ok=True)
            os.truncate(file, 0)  # writers append: they go on at the new end
    replicas = sorted(folder.glob("*-*.log*"), key=_changed, reverse=True)
    for old in replicas[most_files:]:
        old.unlink(missing_ok=True)


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a text file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()[-lines:]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # its replica renamed it since it was listed
        return 0
