"""An engine with vLLM's scheduler, our connector's halves, and a model that is nothing but its cache.

The model writes the tokens of a step into the slots it is told, then reads each request's whole text back
through its block table; the next token is a digest of what it read. So a wrong page changes the answer, as
in a real model: what is said about answers here is seen and not assumed.
"""

import zlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kv_transfer.connector.device_check import DeviceCheck, tables_of
from kv_transfer.connector.guard import orders_of
from kv_transfer.connector.metadata import WorkerNews
from kv_transfer.connector.step_check import StepCheck
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Tables, judge_torch
from tests.support.members import membership_file
from tests.support.real_scheduler import (
    BLOCK,
    TableKeeper,
    a_request,
    cache_config,
    engine_config,
    hasher,
    output_of,
    scheduler_of,
)

LAYER = "layer.0"
Mischief = Callable[["ToyEngine", Any, Tables], None]
"""Called with the step and its tables, before anything looks at them."""


def connected_config(folder: Path, *, integrity: bool, **changed: Any) -> Any:
    """An engine's configuration with our connector."""
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="PhasegateConnector",
        kv_connector_module_path="kv_transfer.connector.facade",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "engine_id": "e",
            "bind_host": "127.0.0.1",
            "backend": "gloo",
            "gauges_endpoint": f"ipc://{folder}/gauges-{integrity}",
            "membership_file": membership_file(folder),
            "integrity": integrity,
        },
    )
    return engine_config(folder, kv_transfer_config=transfer, **changed)


def digest(text: np.ndarray[Any, Any]) -> int:
    """The token that follows."""
    return zlib.crc32(text.tobytes()) % 1000


def right_answer(prompt: list[int], count: int) -> list[int]:
    """What the model answers when every page that it reads is the right one."""
    text = np.array([*prompt, *[0] * count], np.int64)
    for position in range(len(prompt), len(text)):
        text[position] = digest(text[:position])
    return [int(token) for token in text[len(prompt) :]]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str = ""
    params: dict[str, Any] | None = None


class ToyEngine:
    def __init__(
        self, config: Any, pages: int, kind: type, *, in_flight: int = 1, on_device: bool = False
    ) -> None:
        """
        Args:
            on_device: what is wrong is known only with the step's tokens, as on CUDA.
        """
        cache = cache_config(pages)
        self.scheduler = scheduler_of(kind, config, cache)
        self.scheduler.defer_block_free = in_flight > 1
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.guard = self.scheduler.connector.guard
        self.on_device = on_device
        self.check = (
            DeviceCheck(cache, torch.device("cpu"), judge_torch, now=lambda: 0.0)
            if on_device
            else StepCheck(cache, checked=True, now=lambda: 0.0)
        )
        self.in_flight = in_flight
        self.keeper = TableKeeper((GroupShape(BLOCK),))
        self.content = np.zeros((pages, BLOCK), np.int64)
        self.texts: dict[str, list[int]] = {}
        self.answers: dict[str, Answer] = {}
        self.mischief: Mischief | None = None
        self.steps = 0
        self.computed: Counter[str] = Counter()
        """Steps in which each request reached the model."""
        self.batch = SimpleNamespace(
            req_ids=[],
            num_reqs=0,
            block_table=SimpleNamespace(block_tables=[SimpleNamespace(block_size=BLOCK)]),
        )
        self.check.bind_runner(
            SimpleNamespace(input_batch=self.batch, block_tables=SimpleNamespace(block_sizes=[BLOCK]))
        )
        self._hasher = hasher()
        self._flying: deque[tuple[Any, Any]] = deque()

    def close(self) -> None:
        self.scheduler.connector.shutdown()

    def add(
        self,
        name: str,
        prompt: list[int],
        *,
        max_tokens: int = 12,
        salt: str | None = None,
        priority: int = 0,
    ) -> None:
        self.texts[name] = list(prompt)
        self.answers[name] = Answer()
        self.scheduler.add_request(a_request(name, prompt, max_tokens, salt, self._hasher, priority=priority))

    def step(self) -> None:
        """Schedule one, and take in the oldest when enough are under way."""
        step = self.scheduler.schedule()
        self._flying.append((step, self._compute(step)))
        self.steps += 1
        if len(self._flying) >= self.in_flight:
            self._take_in()

    def run(self, limit: int = 400) -> None:
        """Until nothing is left to do."""
        while self.scheduler.requests or self._flying:
            if self.scheduler.requests:
                self.step()
            else:
                self._take_in()
            assert self.steps < limit, "hangs"

    def _take_in(self) -> None:
        step, output = self._flying.popleft()
        for outputs in self.scheduler.update_from_output(step, output).values():
            for output in outputs.outputs:
                answer = self.answers[output.request_id]
                answer.tokens += output.new_token_ids
                if output.finish_reason is not None:
                    answer.reason = str(output.finish_reason)
                    answer.params = output.kv_transfer_params

    def _compute(self, step: Any) -> Any:
        from vllm.v1.outputs import KVConnectorOutput

        self.keeper.take(step)
        plan = self.keeper.plan
        self.computed.update(plan.keys())
        (tables,) = self.keeper.kernel_tables()
        self.batch.req_ids, self.batch.num_reqs = list(plan), len(plan)
        if self.mischief is not None:
            self.mischief(self, step, tables)
        orders = orders_of(step)
        clear = step.new_block_ids_to_zero or []
        copies = [tuple(pair) for pair in step.kv_cache_block_copies or []]
        if orders is not None:
            clear, copies = self.check.before_step(orders, clear, copies)
        self.content[clear] = 0
        for source, target in copies:
            self.content[target] = self.content[source]
        metadata = SimpleNamespace(
            block_table=torch.from_numpy(tables.block_table),
            seq_lens=torch.from_numpy(tables.seq_lens),
            query_start_loc=torch.from_numpy(tables.query_start_loc),
            slot_mapping=torch.from_numpy(tables.slot_mapping),
        )
        assert orders is None or step.has_sync_kv_loads or not plan, "the check would come after the forward"
        context = SimpleNamespace(
            attn_metadata={LAYER: metadata} if plan else None, slot_mapping={LAYER: metadata.slot_mapping}
        )
        if isinstance(self.check, DeviceCheck):
            runs = SimpleNamespace(seq_lens=metadata.seq_lens, query_start_loc=metadata.query_start_loc)
            seen = tables_of(runs, [metadata.block_table], [metadata.slot_mapping])
            self.check.check_tables(list(plan), seen)
        self.check.before_forward(orders, context)
        tokens = self._forward(tables, plan)
        faults, refused = self.check.take()
        news = WorkerNews({}, faults, self.check.take_verdict(), refused, self.check.counts)
        told = KVConnectorOutput(kv_connector_worker_meta=news)
        return output_of(step, tokens, told)

    def _forward(self, tables: Tables, plan: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
        slots = iter(tables.slot_mapping.tolist())
        flat = self.content.reshape(-1)
        for request_id, (computed, count) in plan.items():
            for position in range(computed, computed + count):
                if (slot := next(slots)) >= 0:
                    flat[slot] = self.texts[request_id][position]
        tokens = {}
        for row, (request_id, (computed, count)) in enumerate(plan.items()):
            tokens[request_id] = []
            if not self.scheduler.requests[request_id].is_prefill_chunk:
                read = self.content[tables.block_table[row]].reshape(-1)[: tables.seq_lens[row]]
                token = digest(read)
                # A token that was under way when its request was preempted is sampled again.
                self.texts[request_id][computed + count :] = [token]
                tokens[request_id] = [token]
        return tokens

    def balanced(self) -> None:
        """Every page is free, once, and nobody is remembered."""
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert len(free) == self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        if isinstance(self.guard.ledger, GenerationLedger):
            assert self.guard.ledger.rows == 0
            assert not self.scheduler.kv_cache_manager.condemned


Engines = Callable[..., ToyEngine]
"""Makes one for a test, which closes it."""
