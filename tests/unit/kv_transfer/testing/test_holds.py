import asyncio
from pathlib import Path

import pytest
import torch

from kv_transfer.api.faults import FaultConfig
from kv_transfer.testing.faults import Faults, HeldFence
from kv_transfer.testing.holds import LONGEST_S, LOOK_EVERY_S, FolderHolds, NoHolds, holds_in
from kv_transfer.transport.lane import Fence


def reached(folder: Path, stage: str) -> list[str]:
    return sorted(entry.name for entry in (folder / f"{stage}.reached").iterdir())


async def test_a_request_waits_while_the_file_is_there_and_says_that_it_came(tmp_path: Path) -> None:
    looks = 0

    async def sleep(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            (tmp_path / "decoding").unlink()

    (tmp_path / "decoding").touch()

    await FolderHolds(tmp_path, sleep=sleep).at("decoding", "r1")

    assert looks == 3
    assert reached(tmp_path, "decoding") == ["r1"]


async def test_another_stage_is_passed_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "decoding").touch()

    await FolderHolds(tmp_path).at("rendering", "r1")

    assert not (tmp_path / "rendering.reached").exists()


async def test_a_waiting_request_may_be_cancelled(tmp_path: Path) -> None:
    (tmp_path / "decoding").touch()
    waiting = asyncio.create_task(FolderHolds(tmp_path).at("decoding", "r1"))
    await asyncio.sleep(0)

    waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_forgotten_barrier_costs_a_bounded_time(tmp_path: Path) -> None:
    slept = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    (tmp_path / "decoding").touch()

    await FolderHolds(tmp_path, sleep=sleep).at("decoding", "r1")

    assert slept == pytest.approx(LONGEST_S)


async def test_without_a_folder_nothing_is_held() -> None:
    holds = holds_in(None)

    assert isinstance(holds, NoHolds)
    assert not holds.held("decoding", "r1")
    await holds.at("decoding", "r1")


def test_a_fence_waits_for_the_wire_barrier_on_its_own_thread(tmp_path: Path) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        (tmp_path / "wire").unlink()

    (tmp_path / "wire").touch()

    HeldFence(Fence(torch.device("cpu")), FolderHolds(tmp_path), "t1", sleep).wait()

    assert slept == [LOOK_EVERY_S]
    assert reached(tmp_path, "wire") == ["t1"]


def test_without_barriers_the_fence_is_the_lanes_own() -> None:
    fence = Fence(torch.device("cpu"))

    assert Faults(FaultConfig()).fence("t1", fence) is fence
