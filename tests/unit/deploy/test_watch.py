from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import psutil
import pytest
import redis

from deploy.redis_server import RedisError, RedisServer, start_redis
from deploy.watch import (
    CORE,
    MOST_RESTARTS,
    RESTARTS_WITHIN_S,
    ClusterLost,
    Core,
    PartLost,
    RedisKeeper,
    RestartBudget,
    ended_how,
)
from tests.support.stack import eventually

PASSWORD = "correct-horse"


@dataclass
class Ended:
    """A process that is over, or not."""

    code: int | None = None

    def poll(self) -> int | None:
        return self.code


@dataclass
class Starter:
    """Starts servers that end when told; remembers on which ports it was asked to."""

    ports: list[int | None] = field(default_factory=list)
    process: Any = None
    refuse: bool = False

    def __call__(self, port: int | None) -> RedisServer:
        if self.refuse:
            raise RedisError("Redis did not start; its last words:\nno room")
        self.ports.append(port)
        self.process = Ended()
        return RedisServer(process=self.process, port=port or 7000, url="redis://x")


def keeper(start: Starter, said: list[str], now: Callable[[], float] = lambda: 0.0) -> RedisKeeper:
    return RedisKeeper(start, say=said.append, now=now)


def test_a_redis_that_lives_is_left_alone() -> None:
    start, said = Starter(), []
    keeper(start, said).look()

    assert (start.ports, said) == ([None], [])


def test_a_redis_that_ends_is_started_again_on_its_port_and_both_are_told() -> None:
    start, said = Starter(), []
    kept = keeper(start, said)
    start.process.code = -9

    kept.look()
    kept.look()

    assert start.ports == [None, 7000]
    assert [line.split(":")[0].split(" after")[0] for line in said] == [
        "redis ended by itself (killed by signal 9)",
        "redis is back",
    ]


def test_a_redis_that_keeps_ending_ends_the_system_and_one_that_ends_now_and_then_does_not() -> None:
    clock = [0.0]
    start = Starter()
    kept = keeper(start, [], now=lambda: clock[0])
    for _ in range(3 * MOST_RESTARTS):
        start.process.code = 1
        kept.look()
        clock[0] += RESTARTS_WITHIN_S / MOST_RESTARTS + 1
    clock[0] += RESTARTS_WITHIN_S

    for _ in range(MOST_RESTARTS):
        start.process.code = 1
        kept.look()
    start.process.code = 1
    with pytest.raises(PartLost, match=r"ended 6 times within 60 s, at last exit status 1: see redis\.log"):
        kept.look()


def test_a_redis_that_cannot_be_started_again_is_told_with_its_last_words() -> None:
    start = Starter()
    kept = keeper(start, [])
    start.process.code, start.refuse = -9, True

    with pytest.raises(PartLost, match=r"killed by signal 9[\s\S]*no room"):
        kept.look()


def test_a_budget_forgets_what_is_long_ago() -> None:
    budget = RestartBudget(2, 10.0)

    assert [budget.take(at) for at in (0.0, 1.0, 2.0, 9.9, 10.0, 10.5, 11.0)] == [
        *(True, True, False, False, True, False, True)
    ]


def test_a_killed_redis_comes_back_with_its_data_under_the_address_that_clients_have(tmp_path: Path) -> None:
    """The real one: kill -9, and the same client goes on."""

    def start(port: int | None) -> RedisServer:
        return start_redis(tmp_path / "redis", PASSWORD, tmp_path / "log", port=port)

    kept = RedisKeeper(start, say=lambda _: None)
    try:
        with redis.Redis.from_url(kept.server.url) as client:
            client.set("key", "value")
            kept.server.process.kill()
            kept.server.process.wait()
            kept.look()

            assert client.get("key") == b"value"
    finally:
        kept.stop()


@pytest.fixture
def core() -> Iterator[dict[str, psutil.Process]]:
    started = {name: Popen(["sleep", "60"], stdout=DEVNULL) for name in CORE}
    yield {name: psutil.Process(process.pid) for name, process in started.items()}
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", CORE)
def test_the_loss_of_either_of_rays_processes_is_told_by_name_pid_and_remedy(
    core: dict[str, psutil.Process], name: str
) -> None:
    watched = Core(core)
    watched.look()
    assert watched.complete

    core[name].kill()
    eventually(lambda: watched.complete, lambda complete: not complete)

    with pytest.raises(ClusterLost, match=rf"{name}, pid {core[name].pid}.*`phasegate up`"):
        watched.look()
    assert not watched.complete


def test_a_cluster_that_is_not_there_is_told() -> None:
    with pytest.raises(ClusterLost, match="is not running"):
        Core.of_this_process()


def test_statuses_are_told_in_words() -> None:
    assert (ended_how(-9), ended_how(3)) == ("killed by signal 9", "exit status 3")
