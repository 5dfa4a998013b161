"""Faults of pages and tables for a toy engine: each in one row, once, and what it must end as."""

from collections.abc import Callable
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

from kv_transfer.api.integrity import IntegrityCause as Cause
from kv_transfer.integrity.verify import Tables
from tests.support.real_scheduler import BLOCK
from tests.support.toy_engine import ToyEngine

Mischief = Callable[[ToyEngine, Any, Tables, int], None]
"""Engine, the scheduler's step, its tables, the victim's row."""

PROMPTS: Final = {"a": [1, 2, 3] * 25, "b": [4, 5] * 40, "c": [6] * 70}
"""75, 80 and 70 tokens: three pages each, the last one partly filled."""


class Once:
    """A fault in the victim's row, in the first step that computes it after `after` tokens."""

    def __init__(self, do: Mischief, after: int) -> None:
        self.do, self.after = do, after
        self.done = False

    def __call__(self, engine: ToyEngine, step: Any, tables: Tables) -> None:
        computed, _ = engine.keeper.plan.get("a", (-1, 0))
        if not self.done and computed >= self.after and {"a", "b"} <= engine.keeper.plan.keys():
            self.done = True
            self.do(engine, step, tables, list(engine.keeper.plan).index("a"))


def entry(index: int) -> Mischief:
    """The victim's entry shows b's page."""

    def flip(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
        tables.block_table[row, index] = engine.keeper.tables["b"][0][index]

    return flip


def shifted(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
    tables.block_table[row, :2] = tables.block_table[row, 1:3]


def foreign_write(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
    """Into b's first page, where b will read."""
    tables.slot_mapping[tables.query_start_loc[row]] = engine.keeper.tables["b"][0][0] * BLOCK + 3


def live_page_freed(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
    """Seen with the next step; by then the page has been given to `late`, who writes to it."""
    block = engine.pool.blocks[engine.keeper.tables["a"][0][0]]
    engine.pool.evict_blocks({block.block_id})
    engine.pool.free_blocks([block])
    engine.add("late", [9] * 70)


def wrong_clear(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
    """The victim's page is cleared before the forward; nobody asked for it."""
    step.new_block_ids_to_zero = [engine.keeper.tables["a"][0][0]]


def wrong_copy(engine: ToyEngine, step: Any, tables: Tables, row: int) -> None:
    a, b = (engine.keeper.tables[name][0][0] for name in "ab")
    step.kv_cache_block_copies = [KVCacheBlockCopy(b, a)]


ENDS: Final = {
    "first entry": (entry(0), Cause.REALLOCATED),
    "middle entry": (entry(1), Cause.REALLOCATED),
    "last entry": (entry(2), Cause.REALLOCATED),
    "row shifted": (shifted, Cause.SHIFTED),
    "foreign write": (foreign_write, Cause.UNEXPECTED_WRITE),
    "live page freed": (live_page_freed, Cause.REALLOCATED),
}
REFUSED: Final = {
    "wrong clear": (wrong_clear, Cause.ZERO_TARGET),
    "wrong copy": (wrong_copy, Cause.COW_SOURCE),
}
AFTER: Final = {"decode": 75, "later decode": 80}
"""Tokens of the victim before the fault."""


def answers(engine: ToyEngine, mischief: Any = None) -> dict[str, list[int]]:
    engine.mischief = mischief
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, salt=name)
    engine.run()
    return {name: answer.tokens for name, answer in engine.answers.items() if name in PROMPTS}
