import asyncio
from collections.abc import AsyncIterator

import pytest

from gateway.dispatch.fleet import Fleet
from kv_transfer.api import Contract
from tests.support.clock import FakeClock
from tests.support.engine_pool import CONTRACT, FakePool
from workers.api import BUS_VERSION, FaultKind, Frame, Gauges, Phase, ReplicaInfo, WorkerFault


class Watched:
    """A fleet under a clock that the test moves."""

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.clock = FakeClock()
        self.fleet = Fleet(
            pool,
            gateway_id="g",
            contract=CONTRACT,
            silence_s=10.0,
            now=self.clock.now,
            sleep=self.clock.sleep,
        )
        self.task = asyncio.create_task(self.fleet.watch("tcp://127.0.0.1:1"))

    def hear(self, replica_id: str, **gauges: int) -> None:
        known = Gauges(**{"free_pages": 50, "running": 0, "waiting": 0} | gauges)
        self.fleet.heard(Frame(version=BUS_VERSION, engine_id=f"engine-{replica_id}", items=(), gauges=known))


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    pool = FakePool()
    watched = Watched(pool)
    await watched.clock.advance(0.1)
    yield watched
    watched.task.cancel()
    await asyncio.wait([watched.task])
    pool.close()


async def test_replicas_that_exist_are_attached_and_make_it_ready(watched: Watched) -> None:
    assert watched.fleet.ready()


async def test_silent_replica_loses_its_requests_and_is_not_chosen_until_it_speaks(watched: Watched) -> None:
    lost: list[str] = []
    watched.fleet.enter("d1", "r1", lambda: lost.append("r1"))
    for _ in range(22):
        await watched.clock.advance(0.5)
        watched.hear("p1")

    assert lost == ["r1"]
    assert watched.fleet.candidates(Phase.DECODE) == ()
    assert len(watched.fleet.candidates(Phase.PREFILL)) == 1
    assert [info.replica_id for info, _ in watched.fleet.engines()] == ["p1"]

    watched.hear("d1")
    assert len(watched.fleet.candidates(Phase.DECODE)) == 1
    assert {info.replica_id for info, _ in watched.fleet.engines()} == {"p1", "d1"}


async def test_a_replica_on_its_way_out_gets_nothing_new_and_finishes_what_it_has(watched: Watched) -> None:
    """Serve lists a replica no more as soon as it is told to stop: it still has its grace."""
    lost: list[str] = []
    watched.fleet.enter("d1", "r1", lambda: lost.append("r1"))
    watched.pool.present[Phase.DECODE] = ()
    for _ in range(40):
        await watched.clock.advance(0.5)
        watched.hear("d1")

    assert not watched.fleet.ready()
    assert (lost, watched.fleet.in_flight) == ([], 1)
    assert watched.fleet.info("d1").replica_id == "d1"

    watched.fleet.leave("d1", "r1")
    await watched.clock.advance(0.3)
    with pytest.raises(KeyError):
        watched.fleet.info("d1")


async def test_a_suspected_replica_gets_nothing_new_until_it_speaks_and_keeps_what_it_has(
    watched: Watched,
) -> None:
    lost: list[str] = []
    watched.fleet.enter("d1", "r1", lambda: lost.append("r1"))

    dead = WorkerFault(kind=FaultKind.ENGINE_DEAD)
    for harmless in (FaultKind.BUSY, FaultKind.CANCELLED):
        watched.fleet.note("d1", WorkerFault(kind=harmless))
    assert watched.fleet.ready(), "one client that leaves must not close the engine for the others"
    watched.fleet.note("d1", dead)
    watched.fleet.note("unknown", dead)

    assert watched.fleet.candidates(Phase.DECODE) == ()
    assert not watched.fleet.ready()
    assert lost == []
    watched.hear("d1")
    assert watched.fleet.ready()

    watched.fleet.note("d1", dead)
    for _ in range(22):
        await watched.clock.advance(0.5)
        watched.hear("p1")
    assert lost == ["r1"]


async def test_a_removed_replica_that_falls_silent_loses_its_requests(watched: Watched) -> None:
    lost: list[str] = []
    watched.fleet.enter("d1", "r1", lambda: lost.append("r1"))
    watched.fleet.enter("d1", "r2", lambda: lost.append("r2"))
    watched.fleet.leave("d1", "r2")
    watched.pool.present[Phase.DECODE] = ()
    await watched.clock.advance(10.5)

    assert lost == ["r1"]
    with pytest.raises(KeyError):
        watched.fleet.info("d1")


async def test_a_replica_that_is_listed_again_is_used_again(watched: Watched) -> None:
    watched.fleet.enter("d1", "r1", lambda: None)
    watched.pool.present[Phase.DECODE] = ()
    await watched.clock.advance(0.3)
    watched.pool.present[Phase.DECODE] = ("d1",)
    await watched.clock.advance(0.3)

    assert watched.fleet.ready()


async def test_load_is_the_larger_of_the_replicas_word_and_our_own_count(watched: Watched) -> None:
    watched.hear("d1", running=1, waiting=1, free_pages=7)
    for number in range(3):
        watched.fleet.enter("d1", f"r{number}", lambda: None)
    (ours,) = watched.fleet.candidates(Phase.DECODE)
    watched.hear("d1", running=4, waiting=1, free_pages=7)
    (theirs,) = watched.fleet.candidates(Phase.DECODE)

    assert (ours.load, theirs.load, ours.free_pages) == (3, 5, 7)


async def test_failed_attach_is_tried_again() -> None:
    class Refusing(FakePool):
        refusals = 2

        async def attach(self, phase: Phase, *args: str) -> ReplicaInfo | WorkerFault:
            if self.refusals:
                self.refusals -= 1
                return WorkerFault(kind=FaultKind.BUSY)
            return await super().attach(phase, *args)

    pool = Refusing()
    watched = Watched(pool)
    await watched.clock.advance(2.0)
    ready = watched.fleet.ready()
    watched.task.cancel()
    await asyncio.wait([watched.task])
    pool.close()

    assert ready


@pytest.mark.parametrize("answers", [True, False])
async def test_a_replica_that_fell_silent_is_asked_again_whether_it_still_knows_this_gateway(
    answers: bool,
) -> None:
    """A replica forgets a gateway that it cannot reach for a while: nobody else would make it speak again."""

    class Forgetful(FakePool):
        attached = 0

        async def attach(self, phase: Phase, replica_id: str, *args: str) -> ReplicaInfo | WorkerFault:
            if phase is Phase.DECODE:
                self.attached += 1
                if self.attached > 1 and not answers:
                    return WorkerFault(kind=FaultKind.ENGINE_DEAD)
            return await super().attach(phase, replica_id, *args)

    pool = Forgetful()
    watched = Watched(pool)
    for _ in range(21):
        await watched.clock.advance(0.5)
        watched.hear("p1")
    asked_at_first = pool.attached
    silent = watched.fleet.candidates(Phase.DECODE)
    await watched.clock.advance(8.0)
    asked = pool.attached - asked_at_first
    watched.hear("d1")
    speaking = watched.fleet.candidates(Phase.DECODE)
    asked_before = pool.attached
    await watched.clock.advance(8.0)
    watched.task.cancel()
    await asyncio.wait([watched.task])
    pool.close()

    assert (silent, len(speaking)) == ((), 1)
    assert 1 <= asked <= 5, "now and then, not all the time"
    assert pool.attached == asked_before, "who speaks is not asked"


async def test_own_delay_is_not_taken_for_the_engines_silence(watched: Watched) -> None:
    """The process was held up for a minute; frames that wait in its socket were not read yet."""
    lost: list[str] = []
    watched.fleet.enter("d1", "r1", lambda: lost.append("r1"))
    watched.clock.jump(60)
    await watched.clock.advance(0.3)

    assert lost == []


OTHER = Contract(source={"revision": "another"})


async def test_a_replica_that_comes_back_with_another_contract_gets_nothing_and_is_told_of(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """Its model folder was changed while it was down: Serve starts it anew under another id."""
    watched.pool.contracts["d2"] = OTHER
    watched.pool.present[Phase.DECODE] = ("d2",)
    await watched.clock.advance(0.5)
    watched.hear("d2")

    apart = "the gateway and decode replica d2 differ in source: revision one against another"
    assert not watched.fleet.ready()
    assert watched.fleet.candidates(Phase.DECODE) == ()
    assert [(info.replica_id, why) for info, why in watched.fleet.drifted()] == [("d2", apart)]
    assert [watched.fleet.count_drifted(phase) for phase in (Phase.PREFILL, Phase.DECODE)] == [0, 1]
    assert f"engine.drifted replica=d2 phase=decode: {apart}" in caplog.text

    watched.pool.present[Phase.DECODE] = ("d3",)
    await watched.clock.advance(0.5)
    assert watched.fleet.ready()
    assert watched.fleet.drifted() == ()


async def test_of_several_replicas_those_of_the_gateways_contract_go_on(watched: Watched) -> None:
    watched.pool.contracts["d2"] = OTHER
    watched.pool.present[Phase.DECODE] = ("d1", "d2", "d3")
    await watched.clock.advance(0.5)

    assert [each.replica_id for each in watched.fleet.candidates(Phase.DECODE)] == ["d1", "d3"]


@pytest.mark.parametrize("phase", Phase)
async def test_pairs_that_agree_with_each_other_and_not_with_the_gateway_get_nothing(
    watched: Watched, phase: Phase
) -> None:
    """The gateway's template and tokenizer made the prompts."""
    watched.pool.contracts |= {"p2": OTHER, "d2": OTHER}
    watched.pool.present = {Phase.PREFILL: ("p2",), Phase.DECODE: ("d2",)}
    await watched.clock.advance(0.5)

    assert watched.fleet.candidates(phase) == ()
    assert watched.fleet.count_drifted(phase) == 1


async def test_a_replica_that_fell_silent_is_judged_by_what_it_says_when_it_is_back(watched: Watched) -> None:
    for _ in range(22):
        await watched.clock.advance(0.5)
        watched.hear("p1")
    watched.pool.contracts["d1"] = OTHER
    await watched.clock.advance(3.0)
    watched.hear("d1")

    assert watched.fleet.candidates(Phase.DECODE) == ()
    assert watched.fleet.count_drifted(Phase.DECODE) == 1


async def test_pages_that_a_request_will_need_are_counted_until_it_has_begun(watched: Watched) -> None:
    """The replica's own count comes late: a burst must not find the same pages free."""
    watched.hear("d1", free_pages=20)
    watched.fleet.enter("d1", "r1", lambda: None, pages=6)
    watched.fleet.enter("d1", "r2", lambda: None, pages=9)

    assert free_pages(watched) == 5
    watched.fleet.began("d1", "r1")
    assert free_pages(watched) == 11
    watched.fleet.leave("d1", "r2")
    assert free_pages(watched) == 20
    watched.fleet.enter("d1", "r3", lambda: None, pages=30)
    assert free_pages(watched) == 0


def free_pages(watched: Watched) -> int:
    (candidate,) = watched.fleet.candidates(Phase.DECODE)
    return candidate.free_pages
