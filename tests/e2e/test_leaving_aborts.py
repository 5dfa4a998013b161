"""A client leaves while its request is held in a stage: everything that the request held comes back."""

import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.conftest import Answers, Texts
from tests.e2e.conftest import MAX_IN_FLIGHT, MAX_QUEUED
from tests.e2e.test_answers import ask
from tests.support.aborts import Barriers, Client, Farewell, Footprint, await_idle, footprints
from tests.support.prompts import PAGE
from tests.support.stack import Stack, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.ray]

STAGES: Final = (
    "last_token",
    "decoding",
    "copy_in",
    "wire",
    "ship",
    "prefill_called",
    "decode_called",
    "rendering",
    "before_admission",
)
"""From the last to the first: a request on its way to a late stage must not be held in an early one.

`prefill_called`: decode waits for prefill, its offer is parked. `decode_called`: prefill has announced its
pages and nobody asks. `ship`: pages are agreed on and none has left. `wire`: the lane has pages and does not
send. `copy_in`: all pages have arrived and are not in the cache yet.
"""
WITH_CALL: Final = frozenset(STAGES) - {"rendering", "before_admission"}
GATEWAY_SLOTS: Final = MAX_IN_FLIGHT + 16
"""What `deploy.app` lets into one gateway: those in flight and a margin."""

RESULT: Final = Path(__file__).parents[2] / "docs" / "results" / "aborts.json"
"""Written by the long form."""

_numbers = itertools.count()


def a_body(stage: str, *, stream: bool) -> dict[str, Any]:
    """A prompt that no cache knows, of three pages and more; an answer that outlasts the test or is short."""
    words = " ".join(str(next(_numbers) + 1000) for _ in range(PAGE))
    return {
        "prompt": f"{stage} {time.monotonic_ns()} {words}",
        "raw": True,
        "max_tokens": 3 if stage == "last_token" else 4000,
        "temperature": 0 if stage == "last_token" else 1.5,
        "stream": stream,
    }


HELD_TOGETHER: Final = (tuple(stage for stage in STAGES if stage != "decode_called"), ("decode_called",))
"""Prefill and decode are called at once: one that is held in one of these calls must not be in the other."""


class Round:
    """One request per stage and form, as many as can be held at once; then they leave, stage by stage."""

    def __init__(self, stack: Stack, barriers: Barriers) -> None:
        self._stack = stack
        self._barriers = barriers
        self._before: dict[str, int] = {}
        self.reached: Counter[str] = Counter()
        self.returned: Counter[str] = Counter()

    def run(self, *, per_form: int, farewells: Iterator[Farewell]) -> None:
        for stages in HELD_TOGETHER:
            self._run(stages, per_form, farewells)

    def _run(self, stages: tuple[str, ...], per_form: int, farewells: Iterator[Farewell]) -> None:
        clients: dict[str, list[Client]] = {}
        try:
            for stage in stages:
                clients[stage] = []
                self._fill(stage, per_form, clients[stage])
            for stage in stages:
                held = len(self._barriers.reached(stage)) - self._before[stage]
                assert held == len(clients[stage]), f"{stage}: {held} were held, not its own alone"
            for stage in reversed(stages):
                for client in clients[stage]:
                    client.leave(next(farewells))
                self._barriers.release(stage)
                if stage in WITH_CALL:
                    self._await_summaries(stage, clients[stage])
        finally:
            self._barriers.release()
            for client in itertools.chain.from_iterable(clients.values()):
                client.leave("fin")
        await_idle(self._stack, None)
        for stage in stages:
            self.returned[stage] += len(clients[stage])

    def table(self) -> str:
        rows = [f"{stage:<18}{self.reached[stage]:>8}{self.returned[stage]:>10}" for stage in STAGES]
        return "\n".join([f"{'stage':<18}{'reached':>8}{'returned':>10}", *rows])

    def result(self) -> dict[str, dict[str, int]]:
        return {stage: {"reached": self.reached[stage], "returned": self.returned[stage]} for stage in STAGES}

    def _fill(self, stage: str, per_form: int, clients: list[Client]) -> None:
        before = self._before[stage] = len(self._barriers.reached(stage))
        self._barriers.hold(stage)
        for stream in (True, False) * per_form:
            label = f"leaves-{stage}-{next(_numbers)}"
            clients.append(Client(self._stack, a_body(stage, stream=stream), label=label))
        eventually(
            lambda: len(self._barriers.reached(stage)) - before,
            lambda found: found == len(clients),
            within_s=30,
            what=f"requests in stage {stage}",
        )
        self.reached[stage] += len(clients)

    def _await_summaries(self, stage: str, clients: list[Client]) -> None:
        """The gateway has closed these requests, and knows why."""
        for client in clients:
            summary = eventually(
                lambda label=client.label: self._stack.control(f"/requests/{label}"),
                lambda answer: answer.status_code == 200,
            ).json()
            assert summary["status"] == "client_gone", f"{stage}: {summary}"


def farewells() -> Iterator[Farewell]:
    return itertools.cycle(("fin", "fin", "reset"))


@pytest.fixture
def right(client: httpx.Client, stack: Stack, texts: Texts, answers: Answers, model_dir: Path) -> Any:
    """Asserts that the next request answers as a plain engine does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def check(length: int = PAGE + 1) -> None:
        expected = tokenizer.decode(answers[length], skip_special_tokens=True)
        started = time.monotonic()
        for stream in (True, False):
            text, count, _ = ask(client, stack, texts[length][0], stream=stream)
            assert (text, count) == (expected, len(answers[length]))
        assert time.monotonic() - started < 20

    return check


@pytest.fixture
def baseline(stack: Stack, barriers: Barriers, right: Any) -> dict[int, Footprint]:
    """After a warm-up in which every stage was left once: pools of threads and connections are full."""
    right()
    Round(stack, barriers).run(per_form=1, farewells=farewells())
    right()
    return footprints(stack)


@pytest.mark.timeout(240)
def test_a_client_that_leaves_in_any_stage_leaves_nothing_behind(
    stack: Stack, barriers: Barriers, baseline: dict[int, Footprint], right: Any
) -> None:
    found = Round(stack, barriers)

    found.run(per_form=1, farewells=farewells())

    await_idle(stack, baseline)
    right()
    assert found.returned == found.reached == Counter(dict.fromkeys(STAGES, 2)), found.table()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_aborts_in_every_stage(
    stack: Stack, barriers: Barriers, baseline: dict[int, Footprint], right: Any
) -> None:
    found = Round(stack, barriers)
    ways = farewells()

    for _ in range(10):
        found.run(per_form=1, farewells=ways)
        right()

    await_idle(stack, baseline)
    sys.stdout.write(f"\n{found.table()}\n")
    RESULT.write_text(json.dumps(found.result(), indent=1) + "\n")
    assert found.returned == found.reached == Counter(dict.fromkeys(STAGES, 20))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_aborts_at_random_moments(
    stack: Stack, baseline: dict[int, Footprint], right: Any
) -> None:
    rng = random.Random(9)
    ways = farewells()
    for _ in range(25):
        clients = [
            Client(stack, a_body("random", stream=rng.random() < 0.5), label=f"random-{next(_numbers)}")
            for _ in range(8)
        ]
        for client in clients:
            time.sleep(rng.choice((0, 0.005, 0.02, 0.1, 0.4)))
            client.leave(next(ways))

    await_idle(stack, baseline)
    right()


HELLO: Final = {"prompt": "Hello", "max_tokens": 1}


def refused(stack: Stack) -> httpx.Response | None:
    """The refusal, at once; None when the request waits instead."""
    try:
        answer = httpx.post(stack.run_url, json=HELLO, headers=stack.headers, timeout=1.5)
    except httpx.ReadTimeout:
        return None
    assert answer.status_code == 429, answer.text
    return answer


def fill_queue(stack: Stack) -> list[Client]:
    """As many waiting requests as Serve's queue takes: the next one is refused, at once and with a time.

    One that is refused itself came before those that have left were gone; it is sent again.
    """
    queued: list[Client] = []
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end, f"{len(queued)} wait, and the next one is not refused"
        for answered in [client for client in queued if not client.waiting()]:
            answered.leave("fin")
            queued.remove(answered)
        if len(queued) < MAX_QUEUED:
            queued.append(Client(stack, dict(HELLO), label=f"queued-{next(_numbers)}"))
            time.sleep(0.2)
        elif (answer := refused(stack)) is not None and all(client.waiting() for client in queued):
            assert int(answer.headers["retry-after"]) >= 1
            return queued


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("rounds", [2, 4])
def test_queued_requests_that_leave_give_their_places_in_serves_queue_back(
    client: httpx.Client, stack: Stack, barriers: Barriers, rounds: int
) -> None:
    """The gateway is full, and so is Serve's queue before it: again and again all of the queue leaves."""
    before = len(barriers.reached("before_admission"))
    inside: list[Client] = []
    with contextlib.ExitStack() as leaving, barriers.holding("before_admission"):
        for number in range(GATEWAY_SLOTS):
            inside.append(Client(stack, dict(HELLO), label=f"inside-{number}"))
            leaving.callback(inside[-1].leave, "fin")
        eventually(
            lambda: len(barriers.reached("before_admission")) - before,
            lambda found: found == GATEWAY_SLOTS,
            within_s=30,
        )
        for farewell in itertools.islice(itertools.cycle(("fin", "reset")), rounds):
            for queued in fill_queue(stack):
                queued.leave(farewell)
        stayed = fill_queue(stack)
        for queued in stayed:
            leaving.callback(queued.leave, "fin")
        for gone in inside:
            gone.leave("fin")
        barriers.release("before_admission")
        answers = [queued.status() for queued in stayed]

    assert answers == [200] * MAX_QUEUED
    assert client.post(stack.run_url, json=HELLO).status_code == 200
    await_idle(stack, None)
