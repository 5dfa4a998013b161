"""One running system for all tests of this folder: its start is dear."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.stack import Stack, running_stack

DROPPED_FRAME = 3
"""Decode loses this one of its frames with tokens, on purpose: some request of the first test is hit."""


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: object) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(
        folder, profile="exact", config={"testing": {"drop_bus_frame": DROPPED_FRAME}}
    ) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(headers=stack.headers, timeout=120) as client:
        yield client
