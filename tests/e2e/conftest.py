"""One running system for all tests of this folder: its start is dear."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.aborts import Barriers
from tests.support.stack import Stack, running_stack
from tests.support.surface import LIMITS

DROPPED_FRAME = 3
"""Decode loses this one of its frames with tokens, on purpose: some request of the first test is hit."""

MAX_IN_FLIGHT, MAX_QUEUED = 24, 6


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: object) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    barriers = folder / "barriers"
    barriers.mkdir()
    config = {
        "testing": {"drop_bus_frame": DROPPED_FRAME, "holds": str(barriers)},
        "limits": {**LIMITS, "max_in_flight": MAX_IN_FLIGHT, "max_queued": MAX_QUEUED},
    }
    with running_stack(folder, profile="exact", config=config) as stack:
        yield stack


@pytest.fixture(scope="session")
def barriers(stack: Stack) -> Barriers:
    return Barriers(stack.state.parent / "barriers")


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(headers=stack.headers, timeout=120) as client:
        yield client
