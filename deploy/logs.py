"""One log format for every process of the system: time, level, logger, a constant message, then fields."""

import logging
import os
from pathlib import Path
from typing import Final, TextIO

from kv_transfer.api import FieldFormatter

OURS: Final = ("gateway", "workers", "kv_transfer", "deploy")


def log_to_file(path: Path) -> None:
    """From now on this process's log lines, ours from INFO and others' from WARNING, go to a private file."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    handler = logging.StreamHandler(os.fdopen(handle, "a"))
    handler.setFormatter(FieldFormatter())
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


def tail(path: Path, lines: int = 20) -> list[str]:
    """The last lines of a text file; none if there is no file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()[-lines:]
