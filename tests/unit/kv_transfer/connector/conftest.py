from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.transfer_world import World
from tests.support.worker_pair import Worker, worker


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Worker, Worker]]:
    prefill, decode = worker("prefill", tmp_path), worker("decode", tmp_path)
    yield prefill, decode
    prefill.side.close()
    decode.side.close()
