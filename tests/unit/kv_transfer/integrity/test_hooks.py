"""The hooks on vLLM's own pool and schedulers."""

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from kv_transfer.api.integrity import IntegrityCause
from kv_transfer.integrity.hooks import (
    UnwatchablePool,
    WatchedHashes,
    WatchedQueue,
    keep_lost_pages,
    reconcile,
    watch,
)
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.tags import domain_of, tag_domain
from tests.support.real_scheduler import BLOCK, Life, a_request, cache_config, engine_config, scheduler_of
from tests.support.twice import first_page_given_again

FULL, WINDOW = GroupShape(BLOCK), GroupShape(BLOCK, 64)
LifeOf = Callable[..., Life]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return engine_config(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def life_of(config: Any) -> LifeOf:
    def make(
        pages: int, *shapes: GroupShape, kind: type = Scheduler, seed: int = 1, in_flight: int = 1
    ) -> Life:
        shapes = shapes or (FULL,)
        scheduler = scheduler_of(kind, config, cache_config(pages, tuple(shape.window for shape in shapes)))
        return Life(scheduler, shapes, seed, in_flight)

    return make


@pytest.mark.timeout(120)
@pytest.mark.parametrize("pages", [17, 60])
@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW)], ids=["full", "full and window"])
def test_right_schedules_flag_nobody(life_of: LifeOf, pages: int, shapes: tuple[GroupShape, ...]) -> None:
    life = life_of(pages * len(shapes), *shapes)
    life.run(30)

    assert life.faults == {}
    assert not life.ledger.counts
    assert life.seen["hits"] > 0
    assert life.seen["chunks"] > 0
    assert pages == 60 or life.seen["preempted"] > 0
    life.balanced()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shapes", [(FULL,), (FULL, WINDOW)], ids=["full", "full and window"])
def test_right_schedules_with_steps_in_flight_flag_nobody(
    life_of: LifeOf, shapes: tuple[GroupShape, ...]
) -> None:
    life = life_of(20 * len(shapes), *shapes, kind=AsyncScheduler, in_flight=2)
    life.scheduler.defer_block_free = True
    life.run(30)

    assert life.faults == {}
    assert not life.ledger.counts
    life.balanced()


class Two:
    """Requests `a` and `b` of different tenants, each one prefill and some steps far."""

    def __init__(self, life: Life, steps: int = 2) -> None:
        self.life = life
        self.pool = life.pool
        for name, salt in (("a", "A"), ("b", "B")):
            prompt = [ord(name) + i % 7 for i in range(70)]
            life.scheduler.add_request(a_request(name, prompt, 60, salt, life.hasher))
        self.steps(steps)

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.life.finish(*self.life.schedule())

    def blocks(self, name: str) -> list[Any]:
        return self.life.scheduler.kv_cache_manager.coordinator.get_blocks(name)[0]

    def end(self, *names: str) -> None:
        """As the scheduler does with those that were flagged."""
        self.life.scheduler.kv_cache_manager.condemned.update(names)
        self.life.scheduler.finish_requests(names, RequestStatus.FINISHED_ERROR)

    def causes(self) -> dict[str, IntegrityCause]:
        return {name: fault.cause for name, fault in self.life.faults.items()}

    def all_end_and_balance(self) -> None:
        self.end("a", "b")
        self.life.scheduler.schedule()
        self.life.balanced()


def test_a_live_page_that_is_freed_ends_its_owner_and_is_not_freed_twice(life_of: LifeOf) -> None:
    two = Two(life_of(20))
    two.pool.free_blocks([two.blocks("a")[0]])
    two.steps()

    assert two.causes() == {"a": IntegrityCause.FREED}
    two.all_end_and_balance()


def test_a_live_page_that_is_freed_and_given_out_anew_is_the_new_owners(life_of: LifeOf) -> None:
    two = Two(life_of(8))
    stolen = two.blocks("a")[2]
    two.pool.free_blocks([stolen])
    two.life.scheduler.add_request(a_request("c", [3] * 40, 9, "C", two.life.hasher))
    two.steps()

    assert stolen in two.blocks("c")
    assert two.causes() == {"a": IntegrityCause.REALLOCATED}
    two.end("a")
    assert stolen.ref_cnt == 1
    two.end("c")
    two.all_end_and_balance()


def test_a_page_queued_in_use_stays_out_of_the_queue_and_the_engine_lives(life_of: LifeOf) -> None:
    """Stock vLLM hands it out, asserts, and the engine dies."""
    two = Two(life_of(8))
    two.pool.free_block_queue.prepend_n([two.blocks("a")[0]])
    two.life.scheduler.add_request(a_request("c", [3] * 40, 9, "C", two.life.hasher))
    two.steps()

    assert two.causes() == {"a": IntegrityCause.FREED}
    two.end("c")
    two.all_end_and_balance()


@pytest.mark.parametrize("counted", [False, True], ids=["reference forgotten", "reference counted"])
@pytest.mark.parametrize("when", ["one step", "across steps"])
def test_a_page_given_out_twice_ends_both(life_of: LifeOf, counted: bool, when: str) -> None:
    life = life_of(20)
    across = when == "across steps"
    with first_page_given_again(life.pool, at=3 if across else 2, counted=counted):
        two = Two(life, steps=0 if across else 1)
        two.steps(40 if across else 0)

    assert set(two.causes().values()) == {IntegrityCause.DOUBLE_ASSIGNED}
    assert two.causes().keys() >= {"a", "b"} or across
    two.all_end_and_balance()


@pytest.mark.parametrize("foreign", [False, True], ids=["stale", "foreign"])
def test_a_hash_that_leads_to_another_page_or_tenant_is_not_followed(life_of: LifeOf, foreign: bool) -> None:
    two = Two(life_of(20))
    hashes = two.pool.cached_block_hash_to_block
    page_of_b = two.blocks("b")[2]
    prompt = [5] * 70
    asks = a_request("c", prompt, 9, "C", two.life.hasher)
    key = make_block_hash_with_group_id(asks.block_hashes[0], 0)
    if foreign:
        two.life.ledger.serve("b", 77)
        hashes.insert(key, page_of_b)
        two.life.ledger.serve_nobody()
    else:
        hashes._cache[key] = page_of_b
    two.life.scheduler.add_request(asks)
    two.steps()

    cause = IntegrityCause.FOREIGN_DOMAIN if foreign else IntegrityCause.STALE_PREFIX
    assert two.life.ledger.counts == {cause: 1}
    assert two.causes() == {}
    assert page_of_b not in two.blocks("c")
    assert key in hashes._cache, "c's own page is found under its hash now"
    two.end("c")
    two.all_end_and_balance()


def test_what_a_condemned_request_wrote_is_not_found_again(life_of: LifeOf) -> None:
    two = Two(life_of(20))
    two.end("a")
    prompt = [ord("a") + i % 7 for i in range(70)]
    for name, hit in (("again", 0), ("b again", 64)):
        salt, ids = ("A", prompt) if name == "again" else ("B", [ord("b") + i % 7 for i in range(70)])
        asks = a_request(name, ids, 5, salt, two.life.hasher)
        _, tokens, _ = two.life.scheduler.kv_cache_manager.get_computed_blocks(asks)
        assert tokens == hit


def test_a_reset_of_the_prefix_cache_keeps_the_hooks(life_of: LifeOf) -> None:
    life = life_of(30)
    life.run(5)
    assert life.pool.reset_prefix_cache()
    assert isinstance(life.pool.cached_block_hash_to_block, WatchedHashes)
    assert life.ledger.bindings == 0
    life.run(5)

    assert life.faults == {}
    life.balanced()


def test_a_pool_that_is_in_use_is_not_watched(life_of: LifeOf) -> None:
    life = life_of(20)
    life.pool.get_new_blocks(1)

    with pytest.raises(UnwatchablePool, match="1 pages are in use"):
        watch(life.scheduler.kv_cache_manager)


def test_a_pool_whose_pages_hold_something_is_not_watched(life_of: LifeOf) -> None:
    """Whose it is would never be known."""
    life = life_of(20)
    life.pool.cached_block_hash_to_block.insert("key", life.pool.blocks[1])

    with pytest.raises(UnwatchablePool):
        watch(life.scheduler.kv_cache_manager)


@pytest.mark.parametrize("way", ["popleft", "popleft_n", "remove"])
def test_a_page_is_told_of_whichever_way_it_leaves_the_queue(life_of: LifeOf, way: str) -> None:
    life = life_of(20)
    queue = life.pool.free_block_queue
    block = queue.get_all_free_blocks()[0]
    getattr(queue, way)(*{"popleft": (), "popleft_n": (1,), "remove": (block,)}[way])

    assert not life.ledger.is_free(block.block_id)


@pytest.mark.parametrize("way", ["append", "append_n", "prepend_n"])
def test_a_page_in_use_stays_out_of_the_queue_whichever_way_it_would_come(life_of: LifeOf, way: str) -> None:
    two = Two(life_of(20))
    block, queue = two.blocks("a")[0], two.pool.free_block_queue
    before = queue.num_free_blocks
    getattr(queue, way)(block if way == "append" else [block])

    assert block not in queue.get_all_free_blocks()
    assert queue.num_free_blocks == before
    assert two.life.ledger.take_flagged().keys() == {"a"}


def test_of_two_pages_with_one_hash_the_right_one_is_found(life_of: LifeOf) -> None:
    life = life_of(20)
    hashes, first, second = life.pool.cached_block_hash_to_block, *life.pool.blocks[1:3]
    life.ledger.serve("a", 7)
    hashes.insert("key", first)
    hashes.insert("key", second)
    life.ledger.unbound("key", first.block_id)

    assert hashes.get_one_block("key") is second
    assert life.ledger.counts == {IntegrityCause.STALE_PREFIX: 1}


def test_pages_have_their_tenants_domain_and_nobody_is_served_between_calls(life_of: LifeOf) -> None:
    two = Two(life_of(20))
    ledger, manager = two.life.ledger, two.life.scheduler.kv_cache_manager
    domains = [tag_domain(ledger.tag(two.blocks(name)[0].block_id)) for name in "ab"]
    assert domains == [domain_of("A"), domain_of("B")]
    request = two.life.scheduler.requests["a"]
    assert ledger.serving is None
    manager.get_computed_blocks(request)
    assert ledger.serving is None
    manager.cache_blocks(request, 70)
    assert ledger.serving is None
    manager.allocate_slots(request, 1)
    assert ledger.serving is None


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("call", ["cache_blocks", "allocate_slots"])
def test_a_flagged_request_hashes_nothing_any_more(life_of: LifeOf, call: str, flagged: bool) -> None:
    two = Two(life_of(20), steps=1)
    manager, request = two.life.scheduler.kv_cache_manager, two.life.scheduler.requests["a"]
    request.append_output_token_ids([7] * 40)
    manager.condemned |= {"a"} if flagged else set()
    known = two.life.ledger.bindings
    manager.allocate_slots(request, 40, delay_cache_blocks=call == "cache_blocks")
    if call == "cache_blocks":
        manager.cache_blocks(request, 110)

    assert two.life.ledger.bindings - known == (0 if flagged else 1)


@pytest.mark.parametrize(
    ("references", "entries", "given_back"),
    [(2, 1, 1), (1, 1, 0), (2, 2, 1), (3, 2, 2)],
    ids=["its own", "its owner's", "one of two", "both"],
)
def test_of_pages_that_wait_only_those_references_go_back_that_are_no_owners(
    life_of: LifeOf, references: int, entries: int, given_back: int
) -> None:
    two = Two(life_of(20))
    block = two.blocks("a")[0]
    null = two.pool.null_block
    block.ref_cnt = references
    two.life.scheduler.deferred_frees.extend((step, [block, null]) for step in range(entries))

    keep_lost_pages(two.life.ledger, two.life.scheduler)

    waiting = [each for _, blocks in two.life.scheduler.deferred_frees for each in blocks]
    assert (waiting.count(block), waiting.count(null)) == (given_back, entries)


def test_pages_that_are_hashed_after_the_forward_are_found_by_their_tenant(life_of: LifeOf) -> None:
    """Of tokens that were not known when their place was given out, or pages that came from elsewhere."""
    life = life_of(20)
    two = Two(life)
    manager, request = life.scheduler.kv_cache_manager, two.life.scheduler.requests["a"]
    request.append_output_token_ids([1] * 40)
    manager.allocate_slots(request, 40, delay_cache_blocks=True)
    asks = a_request("again", list(request.all_token_ids)[:97], 5, "A", life.hasher)
    assert manager.get_computed_blocks(asks)[1] == 64
    manager.cache_blocks(request, 96)

    _, tokens, _ = manager.get_computed_blocks(asks)
    assert tokens == 96
    assert not life.ledger.counts


def test_a_window_that_moves_on_between_steps_flags_nobody(life_of: LifeOf) -> None:
    life = life_of(40, FULL, WINDOW)
    two = Two(life, steps=3)
    life.scheduler.kv_cache_manager.remove_skipped_blocks("a", 200)

    extents = life.ledger.extents("a")
    assert extents[1][0] > 0
    assert two.life.ledger.row("a", 1)[0] == (0, 0)
    reconcile(life.ledger, life.scheduler)
    assert life.ledger.take_flagged() == {}


@pytest.mark.parametrize("pending", [True, False], ids=["copy pending", "no copy"])
def test_references_of_copies_that_have_to_run_are_explained(life_of: LifeOf, pending: bool) -> None:
    two = Two(life_of(20))
    (manager,) = two.life.scheduler.kv_cache_manager.coordinator.single_type_managers
    source, target = two.blocks("a")[0], two.blocks("b")[0]
    for block in (source, target):
        block.ref_cnt += 1
        two.life.ledger.touched(block.block_id)
    if pending:
        manager._pending_cow_copies.append((source, target))
    reconcile(two.life.ledger, two.life.scheduler)

    assert two.life.ledger.take_flagged().keys() == (set() if pending else {"a", "b"})


def test_what_a_condemned_request_found_is_found_again(life_of: LifeOf) -> None:
    """Others wrote it."""
    two = Two(life_of(20))
    prompt = [ord("a") + i % 7 for i in range(70)]
    for name in ("c", "again"):
        asks = a_request(name, prompt, 5, "A", two.life.hasher)
        if name == "c":
            two.life.scheduler.add_request(asks)
            two.steps()
            assert two.blocks("c")[0] is two.blocks("a")[0]
            two.end("c")
    _, tokens, _ = two.life.scheduler.kv_cache_manager.get_computed_blocks(asks)

    assert tokens == 64


# -- what vLLM's pool can do, as its source says: a new way past the hooks fails here

WAYS = {
    "free_block_queue": {"popleft", "popleft_n", "remove", "append_n", "prepend_n", "num_free_blocks"},
    "cached_block_hash_to_block": {"get_one_block", "contain", "insert", "pop"},
    "metrics_collector": {"on_block_allocated", "on_block_accessed", "on_block_evicted", "reset"},
}
COUNTING = {"get_new_blocks", "unpin_blocks", "touch", "free_blocks"}
"""Methods that change a page's references."""


def source_of(thing: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(thing)))


def test_the_pool_uses_its_parts_in_no_other_way_than_is_watched() -> None:
    used: dict[str, set[str]] = {name: set() for name in WAYS}
    for node in ast.walk(source_of(BlockPool)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
            used.get(node.value.attr, set()).add(node.attr)

    assert used == WAYS


def test_no_other_method_of_the_pool_counts_references() -> None:
    counting = set()
    for method in ast.walk(source_of(BlockPool)):
        if isinstance(method, ast.FunctionDef):
            changed = [n.target for n in ast.walk(method) if isinstance(n, ast.AugAssign)]
            changed += [t for n in ast.walk(method) if isinstance(n, ast.Assign) for t in n.targets]
            if any(isinstance(t, ast.Attribute) and t.attr == "ref_cnt" for t in changed):
                counting.add(method.name)

    assert counting == COUNTING


@pytest.mark.parametrize(
    ("ours", "theirs", "harmless"),
    [
        (WatchedQueue, FreeKVCacheBlockQueue, {"get_all_free_blocks", "iter_blocks_after"}),
        (WatchedHashes, BlockHashToBlockMap, {"contain", "__len__", "_unexpected_blocks_type"}),
    ],
)
def test_every_method_that_changes_something_is_overridden(
    ours: type, theirs: type, harmless: set[str]
) -> None:
    assert {name for name, v in vars(theirs).items() if inspect.isfunction(v)} - harmless == {
        name for name, v in vars(ours).items() if inspect.isfunction(v) and name in vars(theirs)
    }
