"""What the worker's side finds to check in a step on the host, and what it does not let run before."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.worker_base import WorkerBase

from kv_transfer.api.integrity import IntegrityCause, PageFault
from kv_transfer.connector import checked_worker
from kv_transfer.connector.layout import UnsupportedCache
from kv_transfer.connector.metadata import CheckOrders, StepOrders
from kv_transfer.connector.step_check import StepCheck, shapes_of
from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.prestep import Rights
from kv_transfer.integrity.shadow import GroupShape
from tests.support.real_scheduler import BLOCK, cache_config

PAGES = 9
RIGHT_SLOT = 4 * BLOCK
A_FAULT = PageFault(IntegrityCause.STALE_TRANSFER, 3, 1, 2)


def a_cache(layers: list[str]) -> Any:
    (group,) = cache_config(PAGES).kv_cache_groups
    return KVCacheConfig(PAGES, [], [KVCacheGroupSpec(layers, group.kv_cache_spec)])


def a_check(layers: list[str]) -> tuple[StepCheck, CheckOrders]:
    """Before a step in which request `a`, with pages 3 and 4, computes the second page's first token."""
    check = StepCheck(a_cache(layers), checked=True, now=lambda: 0.0)
    table = SimpleNamespace(block_size=BLOCK)
    batch = SimpleNamespace(req_ids=["a"], num_reqs=1, block_table=SimpleNamespace(block_tables=[table]))
    check.bind_runner(SimpleNamespace(input_batch=batch))
    delta = LedgerDelta(
        tags={page: 100 + page for page in range(PAGES)},
        grown=[RowGrowth("a", 0, 0, [3, 4], [103, 104], [True, True])],
    )
    orders = CheckOrders(delta, {"a": (BLOCK, 1)}, Rights())
    check.before_step(orders, [], [])
    return check, orders


def metadata(first: int = 3, slot: int = RIGHT_SLOT) -> Any:
    return SimpleNamespace(
        block_table=torch.tensor([[first, 4]], dtype=torch.int32),
        seq_lens=torch.tensor([BLOCK + 1], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        slot_mapping=torch.tensor([slot], dtype=torch.int64),
    )


def context(slots: dict[str, int] | None = None, **layers: Any) -> Any:
    """Of a forward. `slots`: by layer, where its slot list is not that of its metadata."""
    own = {name: found.slot_mapping for name, found in layers.items()}
    own |= {name: torch.tensor([slot]) for name, slot in (slots or {}).items()}
    return SimpleNamespace(attn_metadata=layers or None, slot_mapping=own)


def test_every_layer_is_looked_at_where_layers_have_tables_of_their_own() -> None:
    for wrong in (metadata(first=7), metadata(slot=7 * BLOCK)):
        check, orders = a_check(["one", "two"])
        assert check.before_forward(orders, context(one=metadata(), two=metadata())) == set()
        assert check.before_forward(orders, context(one=metadata(), two=wrong)) == {"a"}
        assert wrong.block_table.tolist() == [[0, 0]]
        assert wrong.slot_mapping.tolist() == [-1]


def test_a_slot_list_beside_the_metadata_is_looked_at_too() -> None:
    check, orders = a_check(["one"])
    seen = context({"one": 7 * BLOCK}, one=metadata())

    assert check.before_forward(orders, seen) == {"a"}
    assert seen.slot_mapping["one"].tolist() == [-1]


def test_the_metadatas_own_slot_list_is_looked_at_where_another_stands_beside_it() -> None:
    check, orders = a_check(["one"])
    wrong = metadata(slot=7 * BLOCK)

    assert check.before_forward(orders, context({"one": RIGHT_SLOT}, one=wrong)) == {"a"}
    assert wrong.slot_mapping.tolist() == [-1]


def test_layers_that_share_a_table_may_have_slot_lists_of_their_own_and_the_reverse() -> None:
    shared = metadata()
    check, orders = a_check(["one", "two"])
    assert check.before_forward(orders, context({"two": 7 * BLOCK}, one=shared, two=shared)) == {"a"}

    check, orders = a_check(["one", "two"])
    seen = context(one=metadata(), two=metadata(first=7))
    seen.slot_mapping = {}
    assert check.before_forward(orders, seen) == {"a"}


def test_what_is_left_of_earlier_requests_behind_the_batch_is_not_looked_at() -> None:
    check, orders = a_check(["one"])
    check._runner.input_batch.req_ids = ["a", "gone"]

    assert check.before_forward(orders, context(one=metadata())) == set()


def test_a_forward_that_cannot_be_checked_is_counted_and_what_was_found_before_is_kept() -> None:
    check, orders = a_check(["one"])
    check.fault("b", A_FAULT)
    listed = SimpleNamespace(attn_metadata=[{"one": metadata()}], slot_mapping=[])
    assert check.before_forward(orders, listed) == {"b"}
    assert check.before_forward(orders, context()) == {"b"}
    check._runner = None
    assert check.before_forward(orders, context(one=metadata())) == {"b"}

    assert (check.counts.steps, check.counts.unchecked) == (0, 2)
    assert check.take() == ({"b": A_FAULT}, [])
    assert check.take() == ({}, [])


def test_who_was_wrong_before_the_forward_writes_nothing_in_it() -> None:
    check, orders = a_check(["one"])
    orders = CheckOrders(LedgerDelta(), orders.plan, Rights({4: (104, "a")}))
    assert check.before_step(orders, [], []) == ([], [])
    seen = metadata()

    assert check.before_forward(orders, context(one=seen)) == {"a"}
    assert seen.slot_mapping.tolist() == [-1]
    faults, refused = check.take()
    assert {name: fault.cause for name, fault in faults.items()} == {"a": IntegrityCause.ZERO_TARGET}
    assert refused == []


def test_what_nobody_may_clear_or_copy_is_refused_also_where_it_is_no_page() -> None:
    check, orders = a_check(["one"])
    orders = CheckOrders(LedgerDelta(), orders.plan, Rights())

    assert check.before_step(orders, [-1, PAGES], [(-1, 3), (PAGES, 3)]) == ([], [])
    rights = Rights({-1: (100 + PAGES - 1, "a"), PAGES: (104, "a")})
    assert check.before_step(CheckOrders(LedgerDelta(), {}, rights), [-1, PAGES], []) == ([], [])
    _, refused = check.take()
    assert (
        refused
        == [IntegrityCause.ZERO_TARGET] * 2
        + [IntegrityCause.COW_SOURCE] * 2
        + [IntegrityCause.ZERO_TARGET] * 2
    )


def test_a_worker_that_knows_no_tags_finds_no_page_lost() -> None:
    """On CUDA with vLLM's first runner the ledger tells tags, and nobody beside the model follows them."""
    off = StepCheck(a_cache(["one"]), checked=False, now=lambda: 0.0)
    check, _ = a_check(["one"])

    assert off.lost([3, 4], [103, 104]) is None
    assert check.lost([3, 4], [103, 104]) is None
    assert check.lost([3, 4], [103, 105]) is not None


def test_a_check_that_begins_anew_knows_no_request_and_goes_on_counting() -> None:
    check, orders = a_check(["one"])
    check.before_forward(orders, context(one=metadata()))
    check.restart()

    assert check.before_forward(orders, context(one=metadata())) == {"a"}
    assert check.counts.steps == 2


def test_a_forward_that_nobody_checked_is_counted_and_an_empty_step_is_not() -> None:
    check, orders = a_check(["one"])
    check.before_forward(orders, context(one=metadata()))
    check.before_forward(orders, context())
    assert (check.counts.steps, check.counts.unchecked) == (1, 0)

    check.before_forward(None, context(one=metadata()))
    assert (check.counts.steps, check.counts.unchecked) == (1, 1)

    off = StepCheck(a_cache(["one"]), checked=False, now=lambda: 0.0)
    off.before_forward(None, context(one=metadata()))
    assert (off.counts.steps, off.counts.unchecked) == (0, 1)


def test_only_what_may_be_cleared_and_copied_is_left_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    check, orders = a_check(["one"])
    orders = CheckOrders(LedgerDelta(), orders.plan, Rights({4: (104, "a")}, {(3, 5): (103, 105, "a")}))
    monkeypatch.setattr(checked_worker, "connector", lambda: check)
    step: Any = SimpleNamespace(
        kv_connector_metadata=StepOrders(check=orders),
        new_block_ids_to_zero=[4, 7],
        kv_cache_block_copies=[KVCacheBlockCopy(3, 5), KVCacheBlockCopy(3, 7)],
    )
    checked_worker.prepare(step)

    assert step.new_block_ids_to_zero == [4]
    assert step.kv_cache_block_copies == [KVCacheBlockCopy(3, 5)]
    assert check.take() == ({}, [IntegrityCause.ZERO_TARGET, IntegrityCause.COW_SOURCE])


def test_a_step_with_nothing_to_clear_or_copy_brings_the_check_up_to_date_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, _ = a_check(["one"])
    monkeypatch.setattr(checked_worker, "connector", lambda: check)
    orders = CheckOrders(LedgerDelta(tags={3: 999}), {}, Rights())
    step: Any = SimpleNamespace(
        kv_connector_metadata=StepOrders(check=orders),
        new_block_ids_to_zero=None,
        kv_cache_block_copies=None,
    )
    checked_worker.prepare(step)

    assert check.lost([3], [999]) is None
    assert step.new_block_ids_to_zero is step.kv_cache_block_copies is None


class BareWorker(WorkerBase):
    """In the place of a worker of vLLM's: records what runs."""

    def __init__(self) -> None:
        self.model_runner, self.ran = object(), list[Any]()

    def compile_or_warm_up_model(self) -> str:
        self.ran.append("warm-up")
        return "times"

    def execute_model(self, scheduler_output: Any) -> str:
        self.ran.append(scheduler_output.new_block_ids_to_zero)
        return "tokens"


class Checked(checked_worker.CheckedWorker, BareWorker):
    pass


def test_a_worker_prepares_each_step_before_it_runs_and_makes_its_runner_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check, orders = a_check(["one"])
    known: list[Any] = []
    telling = SimpleNamespace(before_step=check.before_step, bind_runner=known.append)
    monkeypatch.setattr(checked_worker, "connector", lambda: telling)
    worker: Any = Checked()
    step = SimpleNamespace(
        kv_connector_metadata=StepOrders(check=CheckOrders(LedgerDelta(), orders.plan, Rights())),
        new_block_ids_to_zero=[7],
        kv_cache_block_copies=None,
    )

    assert worker.compile_or_warm_up_model() == "times"
    assert known == [worker.model_runner]
    assert worker.execute_model(step) == "tokens"
    assert worker.ran == ["warm-up", None], "page 7 is nobody's to clear"


def test_a_window_is_read_as_a_window() -> None:
    assert shapes_of(cache_config(PAGES, (None, 64))) == [GroupShape(BLOCK), GroupShape(BLOCK, 64)]


def test_a_cache_that_is_read_in_a_way_that_is_not_checked_is_refused_by_name() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
    )
    with pytest.raises(UnsupportedCache, match="ChunkedLocalAttentionSpec"):
        shapes_of(KVCacheConfig(PAGES, [], [KVCacheGroupSpec(["one"], spec)]))


def test_kernels_that_divide_pages_further_are_refused() -> None:
    check = StepCheck(a_cache(["one"]), checked=True)
    table = SimpleNamespace(block_size=BLOCK // 2)
    batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))
    with pytest.raises(UnsupportedCache, match=f"kernels read pages of {BLOCK // 2} tokens"):
        check.bind_runner(SimpleNamespace(input_batch=batch))
