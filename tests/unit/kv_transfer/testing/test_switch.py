"""A ledger that comes and goes leaves nothing behind, and knows what is there when it comes."""

from pathlib import Path

import pytest
from vllm.v1.core.block_pool import BlockHashToBlockMap
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from kv_transfer.connector.scheduler import PhasegateScheduler
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.testing.switch import LedgerSwitch
from tests.support.real_scheduler import BLOCK
from tests.support.toy_engine import ToyEngine, connected_config

PAGES = 40


@pytest.fixture
def engine(tmp_path: Path) -> ToyEngine:
    engine = ToyEngine(connected_config(tmp_path, integrity=True), PAGES, PhasegateScheduler)
    yield engine
    engine.close()


def a_switch(engine: ToyEngine) -> LedgerSwitch:
    return LedgerSwitch(engine.scheduler, engine.guard, engine.check)


def some_requests(engine: ToyEngine) -> None:
    """Two share their first pages; one has a prompt of whole pages."""
    shared = list(range(2 * BLOCK))
    for number, prompt in enumerate(([*shared, 7], [*shared, 8, 9], list(range(500, 500 + BLOCK)))):
        engine.add(f"r{number}", prompt, max_tokens=3 * BLOCK)


def test_switched_off_nothing_of_it_is_left_in_the_pool(engine: ToyEngine) -> None:
    some_requests(engine)
    engine.step()
    a_switch(engine).set(on=False)

    manager, pool = engine.scheduler.kv_cache_manager, engine.pool
    parts = (manager, pool.free_block_queue, pool.cached_block_hash_to_block)
    assert [type(p) for p in parts] == [KVCacheManager, FreeKVCacheBlockQueue, BlockHashToBlockMap]
    assert pool.metrics_collector is None
    assert not any(hasattr(part, "ledger") for part in parts)
    before = engine.check.counts.steps
    engine.step()
    assert engine.check.counts.steps == before


def test_answers_are_the_same_however_often_it_is_switched(engine: ToyEngine) -> None:
    some_requests(engine)
    engine.run()
    right = {name: answer.tokens for name, answer in engine.answers.items()}
    some_requests(engine)
    switch = a_switch(engine)
    for number in range(60):
        switch.set(on=number % 3 != 0)
        engine.step()
    checked = engine.check.counts.steps
    engine.run()

    assert {name: answer.tokens for name, answer in engine.answers.items()} == right
    assert not engine.guard.mismatches()
    assert checked
    assert engine.pool.get_num_free_blocks() == PAGES - 1


def test_switched_on_again_it_finds_what_is_wrong_from_then_on(engine: ToyEngine) -> None:
    some_requests(engine)
    engine.step()
    engine.step()
    switch = a_switch(engine)
    switch.set(on=False)
    engine.step()
    switch.set(on=True)
    engine.step()
    ledger = engine.guard.ledger
    assert isinstance(ledger, GenerationLedger)
    shared, _ = ledger.row("r0", 0)[0]
    assert ledger.owners(shared) == {"r0", "r1"}
    engine.mischief = lambda engine, step, tables: tables.block_table.__setitem__((2, 0), shared)

    engine.step()

    assert engine.answers["r2"].reason == "error"
    assert [engine.answers[name].reason for name in ("r0", "r1")] == ["", ""]
