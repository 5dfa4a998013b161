import asyncio
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from load.loops import Prompt, arrivals, closed, opened
from load.record import Record

PROMPTS: list[Prompt] = [[{"role": "user", "content": str(n)}] for n in range(6)]


class World:
    """A server that takes a second for each answer, under a clock that jumps to the next sleeper."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sleepers: list[tuple[float, asyncio.Event]] = []
        self.inside = 0
        self.most_inside = 0

    def clock(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        wake = asyncio.Event()
        self.sleepers.append((self.seconds + seconds, wake))
        await wake.wait()

    async def send(self, prompt: Prompt, due_s: float) -> Record:
        sent_s = self.seconds
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        await self.sleep(1.0)
        self.inside -= 1
        return Record(due_s, sent_s, (self.seconds,), end_s=self.seconds, text=prompt[0]["content"])

    async def run(self) -> None:
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if self.sleepers:
                self.sleepers.sort(key=lambda sleeper: sleeper[0])
                self.seconds, wake = self.sleepers.pop(0)
                wake.set()


async def during(world: World, work: asyncio.Future[tuple[Record, ...]]) -> tuple[Record, ...]:
    running = asyncio.create_task(world.run())
    try:
        return await work
    finally:
        running.cancel()


async def test_a_closed_loop_never_has_more_inside_than_it_has_clients() -> None:
    world = World()

    records = await during(world, asyncio.ensure_future(closed(world.send, PROMPTS, 2, clock=world.clock)))

    assert world.most_inside == 2
    assert sorted(record.text for record in records) == ["0", "1", "2", "3", "4", "5"]
    assert [record.due_s for record in records] == [0, 0, 1, 1, 2, 2]  # due when the client was free


async def test_an_open_loop_does_not_wait_for_a_slow_server() -> None:
    world = World()
    at_s = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]

    records = await during(
        world,
        asyncio.ensure_future(opened(world.send, PROMPTS, at_s, clock=world.clock, sleep=world.sleep)),
    )

    assert world.most_inside == 6
    assert [record.due_s for record in records] == at_s
    assert all(record.late_s < 1e-9 for record in records)


async def test_a_client_that_sends_late_is_seen_in_the_record() -> None:
    world = World()

    async def oversleep(seconds: float) -> None:
        await world.sleep(seconds + 0.5)

    records = await during(
        world,
        asyncio.ensure_future(opened(world.send, PROMPTS[:1], [0.1], clock=world.clock, sleep=oversleep)),
    )

    assert abs(records[0].late_s - 0.5) < 1e-9
    assert abs(records[0].ttft_s - 1.5) < 1e-9  # counted from when it was due


@given(st.integers(0, 1000))
def test_arrivals_are_seeded_and_rise(seed: int) -> None:
    times = arrivals(4.0, 50, Random(seed))

    assert times == arrivals(4.0, 50, Random(seed))
    assert times == sorted(times)


def test_arrivals_come_at_the_rate() -> None:
    times = arrivals(4.0, 4000, Random(1))

    assert 950 < times[-1] < 1050
