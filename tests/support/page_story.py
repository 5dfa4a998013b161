"""Random lives with page faults in them: who is flagged, and what comes between that and its end.

A story is a list of acts, each with a number that says on whom or what: what it means is found when it is
played, so that any part of a story is one, too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from vllm.v1.request import RequestStatus

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.integrity.verify import Tables
from tests.support.page_witness import WitnessedEngine
from tests.support.real_scheduler import BLOCK
from tests.support.toy_engine import right_answer
from tests.support.twice import given_again

Story = list[tuple[str, int]]

_LIKELY: Final = {
    "add": 9,
    "fly": 9,
    "land": 6,
    "abort": 1,
    "twins": 2,
    "preempt": 3,
    "flip": 2,
    "shift": 1,
    "write": 1,
    "uncleared": 1,
    "free": 1,
    "give": 1,
}
_TEXTS: Final = [[(7 * i + i * i + 50 * text) % 900 for i in range(140)] for text in range(2)]
_LENGTHS: Final = (20, 32, 33, 40, 64, 65, 70, 97, 130)


def a_story(seed: int, acts: int) -> Story:
    rnd = random.Random(seed)
    chosen = rnd.choices(list(_LIKELY), list(_LIKELY.values()), k=acts)
    return [(act, rnd.randrange(1 << 20)) for act in chosen]


def story_of(text: str) -> Story:
    """Of `act number, act number, ...`."""
    told = (act.split() for act in text.split(","))
    return [(act, int(number)) for act, number in told]


class Teller:
    """Plays one story on an engine."""

    def __init__(self, engine: WitnessedEngine, seed: int = 0) -> None:
        """
        Args:
            seed: for the names: an engine may play many stories, and no two of its requests have one name.
        """
        self.engine, self._seed = engine, seed
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self._next: AbstractContextManager[Any] = nullcontext()
        """In which the next step is scheduled."""

    def play(self, story: Story) -> None:
        """To its end, and judge it."""
        engine = self.engine
        for act, number in story:
            getattr(self, f"_{act}")(number)
        while engine.scheduler.requests or engine.flying:
            self._fly(0)
            self._land(0)
            assert engine.steps < 400, "hangs"
        self._after()
        self._judge()

    def _after(self) -> None:
        """What was left in the cache is read."""
        engine = self.engine
        engine.fault = None
        for text in range(len(_TEXTS)):
            self._add(len(_LENGTHS) - 1 + len(_LENGTHS) * text)
        while engine.scheduler.requests or engine.flying:
            self._fly(0)
            self._land(0)

    def _judge(self) -> None:
        engine = self.engine
        for name, answer in engine.answers.items():
            right = right_answer(self.prompts[name], len(answer.tokens))
            assert answer.tokens == right, f"{name} was answered from pages that are not its text"
            if name in self.aborted:
                continue
            if PageFault.from_params(answer.params) is not None:
                assert answer.reason == "error"
                assert name in engine.witness.misled, f"{name} ended, and had read nothing wrong"
            else:
                assert answer.reason == "length", f"{name}: {answer.reason}"
        engine.balanced()

    # -- lawful acts

    def _add(self, number: int) -> None:
        scheduler = self.engine.scheduler
        if len(scheduler.requests) >= 8:
            return
        text = _TEXTS[number // len(_LENGTHS) % len(_TEXTS)]
        name = f"{self._seed}.{len(self.prompts)}"
        self.prompts[name] = text[: _LENGTHS[number % len(_LENGTHS)]]
        self.engine.add(name, self.prompts[name], max_tokens=(1, 3, 10, 35)[number // 64 % 4])

    def _twins(self, number: int) -> None:
        """One finds what the other is about to write."""
        for longer in range(2):
            self._add(number + longer)

    def _fly(self, number: int) -> None:
        engine = self.engine
        if engine.flying < engine.in_flight and engine.scheduler.requests:
            scheduled, self._next = self._next, nullcontext()
            with scheduled:
                engine.fly()

    def _land(self, number: int) -> None:
        if self.engine.flying:
            self.engine.land()

    def _abort(self, number: int) -> None:
        alive = sorted(self.engine.scheduler.requests)
        if alive:
            name = alive[number % len(alive)]
            self.aborted.add(name)
            self.engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _preempt(self, number: int) -> None:
        """As vLLM does while it schedules: who is preempted is not resumed in the same step."""
        running = self.engine.scheduler.running
        if running and self.engine.flying < self.engine.in_flight:
            request = running[number % len(running)]
            running.remove(request)
            self.engine.scheduler._preempt_request(request, 0.0)
            self._next = self._without(request)
            self._fly(0)

    @contextmanager
    def _without(self, request: Any) -> Iterator[None]:
        waiting = self.engine.scheduler.waiting
        waiting.remove_request(request)
        try:
            yield
        finally:
            waiting.prepend_request(request)

    # -- faults

    def _befall(self, number: int, do: Callable[[Tables, int, str], bool]) -> None:
        """A row of the next step, if there is one that it can befall."""

        def let_loose(tables: Tables) -> set[str]:
            plan = list(self.engine.keeper.plan)
            if not plan:
                return set()
            row = number % len(plan)
            return {plan[row]} if do(tables, row, plan[row]) else set()

        self.engine.fault = let_loose

    def _flip(self, number: int) -> None:
        def do(tables: Tables, row: int, name: str) -> bool:
            index = number // 8 % -(-int(tables.seq_lens[row]) // BLOCK)
            page = number // 64 % self.engine.pool.num_gpu_blocks
            changed = int(tables.block_table[row, index]) != page
            tables.block_table[row, index] = page
            return changed

        self._befall(number, do)

    def _shift(self, number: int) -> None:
        def do(tables: Tables, row: int, name: str) -> bool:
            used = -(-int(tables.seq_lens[row]) // BLOCK)
            tables.block_table[row, : used - 1] = tables.block_table[row, 1:used]
            return used > 1

        self._befall(number, do)

    def _write(self, number: int) -> None:
        def do(tables: Tables, row: int, name: str) -> bool:
            at = int(tables.query_start_loc[row])
            slot = number // 8 % (self.engine.pool.num_gpu_blocks * BLOCK)
            changed = int(tables.slot_mapping[at]) != slot
            tables.slot_mapping[at] = slot
            return changed

        self._befall(number, do)

    def _uncleared(self, number: int) -> None:
        def do(tables: Tables, row: int, name: str) -> bool:
            page = int(tables.block_table[row, 0])
            self.engine.computes_wrongly(name, PageFault(IntegrityCause.ZERO_TARGET, page, 1, 2))
            return True

        self._befall(number, do)

    def _free(self, number: int) -> None:
        """A page that one request has."""
        if (found := self._lonely(number)) is not None:
            owners, block = found
            self.engine.witness.misled |= owners
            self.engine.pool.free_blocks([block])
            self.engine.landed += 1

    def _give(self, number: int) -> None:
        """A page that one request has, to whoever gets a page next."""
        if (found := self._lonely(number)) is not None:
            self._next = self._given_again(found[1])

    def _given_again(self, block: Any) -> AbstractContextManager[None]:
        given: list[Any] = []

        def once(blocks: list[Any]) -> Any | None:
            just_now = any(page is block for page in blocks)
            if not blocks or just_now or given or not self._is_somebodys(block):
                return None
            given.append(block)
            self.engine.given_again.add(block.block_id)
            self.engine.landed += 1
            return block

        return given_again(self.engine.pool, once)

    def _is_somebodys(self, block: Any) -> bool:
        """And has no hash: vLLM itself dies of pages that are new and have one."""
        manager, names = self.engine.scheduler.kv_cache_manager, self.engine.scheduler.requests
        shown = any(block.block_id in manager.get_block_ids(name)[0] for name in names)
        return shown and block.ref_cnt == 1 and block.block_hash is None

    def _lonely(self, number: int) -> tuple[set[str], Any] | None:
        """A page with one reference, and whose tables show it: more than one after another such fault."""
        manager, blocks = self.engine.scheduler.kv_cache_manager, self.engine.pool.blocks
        shown: dict[int, set[str]] = {}
        for name in sorted(self.engine.scheduler.requests):
            for page in manager.get_block_ids(name)[0]:
                if page and blocks[page].ref_cnt == 1:
                    shown.setdefault(page, set()).add(name)
        if not shown:
            return None
        page = sorted(shown)[number % len(shown)]
        return shown[page], blocks[page]
