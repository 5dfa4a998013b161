"""What stands between vLLM's second model runner and our check, as far as no GPU is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_transfer.connector.compat import TESTED_ON_CUDA, UntestedVllm, require_tested
from kv_transfer.connector.device_check import DeviceCheck, refuse_unseen
from kv_transfer.connector.layout import UnsupportedCache
from kv_transfer.connector.metadata import CheckOrders
from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.prestep import Rights
from kv_transfer.integrity.verify import Tables, judge_torch
from tests.support.real_scheduler import BLOCK, cache_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

PAGES = 9


def a_check() -> DeviceCheck:
    """Before a step in which request `a`, with pages 3 and 4, computes the second page's first token."""
    check = DeviceCheck(cache_config(PAGES), torch.device("cpu"), judge_torch, now=lambda: 0.0)
    delta = LedgerDelta(
        tags={page: 100 + page for page in range(PAGES)},
        grown=[RowGrowth("a", 0, 0, [3, 4], [103, 104], [True, True])],
    )
    check.before_step(CheckOrders(delta, {"a": (BLOCK, 1)}, Rights()), [], [])
    return check


class BlockTables:
    """vLLM's, that cannot work without a GPU: what its kernels would have written."""

    def __init__(self, first: int) -> None:
        self.first = first

    def gather_block_tables(self, idx_mapping: Any, num_reqs_padded: int) -> tuple[torch.Tensor, ...]:
        return (torch.tensor([[self.first, 4, 0], [0, 0, 0]], dtype=torch.int32),)

    def compute_slot_mappings(self, *args: Any, num_tokens_padded: int) -> torch.Tensor:
        return torch.tensor([[4 * BLOCK, -1]])


@pytest.mark.parametrize("first", [3, 7], ids=["right", "wrong"])
def test_tables_are_checked_between_their_making_and_all_who_read_them(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv_transfer.connector import worker_cuda

    check = a_check()
    monkeypatch.setattr(worker_cuda, "connector", lambda: check)
    runner = object.__new__(worker_cuda.CheckedRunner)
    runner.pcp_manager, runner.block_tables = None, BlockTables(first)
    batch = SimpleNamespace(
        req_ids=["a"],
        idx_mapping=None,
        num_reqs_after_padding=2,
        num_tokens_after_padding=2,
        positions=None,
        seq_lens=torch.tensor([BLOCK + 1, 0], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32),
    )
    block_tables, slot_mappings = runner.prepare_attn(batch)
    check.before_forward(None, SimpleNamespace(attn_metadata=None))

    wrong = first != 3
    assert check.take_verdict().read().keys() == ({"a"} if wrong else set())
    assert block_tables[0].tolist() == [[0, 0, 0] if wrong else [3, 4, 0], [0, 0, 0]]
    assert slot_mappings.tolist() == [[-1 if wrong else 4 * BLOCK, -1]]
    assert (check.counts.steps, check.counts.unchecked) == (1, 0)


def wrong_tables() -> Tables:
    return Tables(
        torch.tensor([[7, 4]], dtype=torch.int32),
        torch.tensor([BLOCK + 1], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([4 * BLOCK], dtype=torch.int64),
    )


def test_a_verdict_is_known_to_those_who_ship_and_is_told_with_its_step_alone() -> None:
    check = a_check()
    check.check_tables(["a"], [wrong_tables()])

    assert check.verdict().read().keys() == {"a"}
    assert check.take_verdict().read().keys() == {"a"}
    assert check.take_verdict().read() == {}


def test_those_who_ship_know_of_the_steps_that_may_be_under_way() -> None:
    """Another request may have found what this one was to write: its pages leave steps later."""
    check = a_check()
    for count in range(4):
        check.before_step(
            CheckOrders(LedgerDelta(), {"a": (BLOCK, 1)} if count == 0 else {}, Rights()), [], []
        )
        check.check_tables(["a" if count == 0 else "b"], [wrong_tables()])
        assert ("a" in check.verdict().read()) == (count < 3)


def test_a_step_is_checked_once_and_only_where_it_has_rows() -> None:
    check = a_check()
    check.check_tables(["a"], [wrong_tables()])
    check.check_tables(["a"], [wrong_tables()])
    check.before_step(CheckOrders(LedgerDelta(), {}, Rights()), [], [])
    check.check_tables([], [wrong_tables()])

    assert (check.counts.steps, check.counts.unchecked) == (1, 0)


def test_a_step_that_no_check_saw_counts_as_unchecked() -> None:
    check = a_check()
    for _ in range(2):
        check.before_forward(None, SimpleNamespace(attn_metadata=None))
    empty = CheckOrders(LedgerDelta(), {}, Rights())
    check.before_step(empty, [], [])
    check.before_forward(empty, SimpleNamespace(attn_metadata=None))

    assert (check.counts.steps, check.counts.unchecked) == (0, 1)


def test_kernels_that_divide_pages_further_are_refused() -> None:
    check = a_check()
    check.bind_runner(SimpleNamespace(block_tables=SimpleNamespace(block_sizes=[BLOCK])))
    with pytest.raises(UnsupportedCache, match="kernels read pages of 16 tokens"):
        check.bind_runner(SimpleNamespace(block_tables=SimpleNamespace(block_sizes=[16])))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"decode_context_parallel_size": 2}, "context parallelism in decode"),
        ({"prefill_context_parallel_size": 2}, "context parallelism in prefill"),
    ],
)
def test_what_reads_other_tables_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    parts = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "speculative_config": None,
    } | change
    speculative = parts.pop("speculative_config")
    config: Any = SimpleNamespace(speculative_config=speculative, parallel_config=SimpleNamespace(**parts))
    with pytest.raises(UnsupportedCache, match=named):
        refuse_unseen(config)


def test_the_settings_that_are_refused_are_those_of_vllm() -> None:
    from vllm.config import ParallelConfig, VllmConfig

    refuse_unseen(VllmConfig(parallel_config=ParallelConfig()))


def test_vllms_second_runner_is_the_tested_one_and_another_is_refused() -> None:
    require_tested(TESTED_ON_CUDA)
    name = next(iter(TESTED_ON_CUDA))
    with pytest.raises(UntestedVllm, match="prepare_attn"):
        require_tested({name: "0" * 16})


def test_tables_are_views_so_that_masks_reach_the_kernels() -> None:
    from kv_transfer.connector.device_check import tables_of

    table, slots = torch.ones(2, 3, dtype=torch.int32), torch.ones(1, 4, dtype=torch.int64)
    batch = SimpleNamespace(seq_lens=torch.ones(2), query_start_loc=torch.ones(3))
    (tables,) = tables_of(batch, (table,), slots)
    assert isinstance(tables, Tables)
    tables.block_table[0, 0] = 7
    tables.slot_mapping[0] = -1

    assert (int(table[0, 0]), int(slots[0, 0])) == (7, -1)
