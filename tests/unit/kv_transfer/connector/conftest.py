from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.connector.scheduler import PhasegateAsyncScheduler, PhasegateScheduler
from tests.support.toy_engine import Engines, ToyEngine, connected_config
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


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    folder = tmp_path_factory.mktemp("engine")
    return {integrity: connected_config(folder, integrity=integrity) for integrity in (True, False)}


@pytest.fixture
def engine_of(configs: dict[bool, Any]) -> Iterator[Engines]:
    made: list[ToyEngine] = []

    def make(
        *, integrity: bool = True, pages: int = 40, ahead: bool = False, on_device: bool = False
    ) -> ToyEngine:
        for engine in made:
            engine.close()  # one endpoint, one engine
        made.clear()
        kind = PhasegateAsyncScheduler if ahead else PhasegateScheduler
        in_flight = 2 if ahead else 1
        made.append(ToyEngine(configs[integrity], pages, kind, in_flight=in_flight, on_device=on_device))
        return made[0]

    yield make
    for engine in made:
        engine.close()
