"""The membership key of everything that one test process starts."""

from pathlib import Path
from typing import Final

from kv_transfer.api import Membership

MEMBERSHIP: Final = Membership.mint()


def membership_file(folder: Path) -> str:
    """The key in a private file of `folder`, as an engine's process finds it."""
    path = folder / "membership"
    if not path.exists():
        MEMBERSHIP.write(path)
    return str(path)
