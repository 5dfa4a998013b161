"""Nothing that is right is flagged with two steps in flight either: vLLM's asynchronous scheduler.

Its model is nothing but its cache (`toy_engine`), so each answer is known beforehand.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from kv_transfer.connector.scheduler import PhasegateAsyncScheduler
from tests.support.step_watch import StepWatch
from tests.support.toy_engine import ToyEngine, connected_config, right_answer

EngineOf = Callable[[str], ToyEngine]


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[EngineOf]:
    made: list[ToyEngine] = []

    def make(policy: str) -> ToyEngine:
        config = connected_config(
            tmp_path, integrity=True, scheduling_policy=policy, max_num_batched_tokens=96
        )
        made.append(ToyEngine(config, 24, PhasegateAsyncScheduler, in_flight=2))
        return made[0]

    yield make
    for engine in made:
        engine.close()


class Load:
    def __init__(self, engine: ToyEngine, seed: int) -> None:
        self.engine, self.rnd = engine, random.Random(seed)
        self.watch = StepWatch(engine.scheduler)
        self.prompts: dict[str, list[int]] = {}
        self.prefixes = [[self.rnd.randrange(1000) for _ in range(n)] for n in (64, 96, 224)]

    def run(self, requests: int) -> None:
        scheduler = self.engine.scheduler
        while len(self.prompts) < requests or scheduler.requests:
            while len(self.prompts) < requests and len(scheduler.requests) < 12 and self.rnd.random() < 0.6:
                self.add()
            if scheduler.requests:
                self.engine.step()
            if scheduler.requests and self.rnd.random() < 0.03:
                self.watch.abort(lambda: self.abort(self.rnd.choice(sorted(scheduler.requests))))
            assert self.engine.steps < 40 * requests, "hangs"
        self.engine.run(limit=40 * requests)

    def add(self) -> None:
        prefix = self.rnd.choice(self.prefixes)
        prompt = prefix[: self.rnd.choice([20, 32, 50, 64, len(prefix)])]
        prompt = prompt + [self.rnd.randrange(1000) for _ in range(self.rnd.choice([0, 1, 31, 32, 60]))]
        name = f"r{len(self.prompts)}"
        self.prompts[name] = prompt
        self.engine.add(
            name,
            prompt,
            max_tokens=self.rnd.randrange(16, 96),
            salt=self.rnd.choice([None, "a", "b"]),
            priority=self.rnd.randrange(4),
        )

    def abort(self, name: str) -> None:
        self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def assert_sound(self) -> None:
        engine = self.engine
        assert dict(engine.guard.mismatches()) == {}
        assert engine.guard.counts.unchecked == 0
        assert engine.guard.counts.pages > 0
        ended = {name: answer for name, answer in engine.answers.items() if answer.reason}
        assert len(ended) == len(self.prompts) - self.watch.aborted
        assert {answer.reason for answer in ended.values()} == {"length"}
        for name, answer in engine.answers.items():
            assert answer.tokens == right_answer(self.prompts[name], len(answer.tokens)), name
        engine.balanced()
        assert self.rare() == {}

    def rare(self) -> dict[str, int]:
        """What happened to too few requests to mean much."""
        watch, least = self.watch, len(self.prompts) / 5
        seen = {"preempted": watch.preempted, "hits": watch.hits, "chunked": watch.chunked}
        rare = {what: len(requests) for what, requests in seen.items() if len(requests) < least}
        return rare | ({"aborted": watch.aborted} if watch.aborted < least / 2 else {})


@pytest.mark.timeout(120)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_mixed_load_with_two_steps_in_flight_flags_nobody_and_is_answered_right(
    engine_of: EngineOf, policy: str
) -> None:
    load = Load(engine_of(policy), seed=5)

    load.run(120)

    load.assert_sound()


def test_a_tag_that_changes_behind_the_ledgers_back_ends_its_request(engine_of: EngineOf) -> None:
    """The proof that the load above would show a mismatch, were there one."""
    engine = engine_of("fcfs")
    for name, token in (("a", 1), ("b", 2)):
        engine.add(name, [token] * 70, salt=name)
    for _ in range(4):
        engine.step()
    page, _ = engine.guard.ledger.row("a", 0)[1]
    engine.guard.ledger._retag(page, 0)
    engine.run()

    assert {name: answer.reason for name, answer in engine.answers.items()} == {"a": "error", "b": "length"}
    # The page is nobody's by then, and is kept back: its one reference is counted too.
    assert dict(engine.guard.mismatches()) == {"reallocated": 1, "double_assigned": 1}


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_two_thousand_requests_with_two_steps_in_flight_flag_nobody(engine_of: EngineOf, policy: str) -> None:
    load = Load(engine_of(policy), seed=6)

    load.run(2000)

    load.assert_sound()
