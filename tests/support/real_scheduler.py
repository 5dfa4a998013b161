"""vLLM's own scheduler with its own pool, and in the model's place something that only checks the tables.

The tables are kept as the CPU model runner keeps them, from what the scheduler says; tokens are random.
"""

import json
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kv_transfer.api.integrity import PageFault
from kv_transfer.integrity.checker import Checker
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Tables

BLOCK = 32
MAX_LEN = 512
_TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def engine_config(folder: Path, **changed: Any) -> Any:
    """vLLM's configuration of an engine that is never started."""
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(_TINY))
    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "block_size": BLOCK,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "enforce_eager": True,
    }
    return EngineArgs(**(arguments | changed)).create_engine_config()


def cache_config(pages: int, windows: tuple[int | None, ...] = (None,)) -> Any:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )

    common = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs = [
        FullAttentionSpec(**common) if window is None else SlidingWindowSpec(**common, sliding_window=window)
        for window in windows
    ]
    groups = [KVCacheGroupSpec([f"layer.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler_of(kind: type, config: Any, cache: Any) -> Any:
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = cache.num_blocks
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


def hasher() -> Callable[[Any], Any]:
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    init_none_hash(sha256_cbor)
    return get_request_block_hasher(BLOCK, sha256_cbor)


def a_request(
    name: str,
    token_ids: list[int],
    max_tokens: int,
    salt: str | None,
    block_hasher: Any,
    *,
    priority: int = 0,
) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        name, token_ids, sampling, None, cache_salt=salt, block_hasher=block_hasher, priority=priority
    )


@dataclass
class TableKeeper:
    """Block tables as the model runner has them."""

    shapes: tuple[GroupShape, ...]
    tables: dict[str, list[list[int]]] = field(default_factory=dict)
    plan: dict[str, tuple[int, int]] = field(default_factory=dict)

    def take(self, step: Any) -> None:
        for request_id in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.tables.pop(request_id, None)
        computed = {}
        for new in step.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[i]
            more = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(ids) for ids in more]
            elif more is not None:
                for table, ids in zip(self.tables[request_id], more, strict=True):
                    table.extend(ids)
        self.plan = {r: (computed[r], count) for r, count in step.num_scheduled_tokens.items()}

    def kernel_tables(self) -> list[Tables]:
        return [self._group(group, shape) for group, shape in enumerate(self.shapes)]

    def _group(self, group: int, shape: GroupShape) -> Tables:
        size = shape.block_size
        rows = [self.tables[request_id][group] for request_id in self.plan]
        table = np.zeros((len(rows) + 1, max(map(len, rows), default=0) + 1), np.int32)
        slots: list[int] = []
        for i, ((computed, count), pages) in enumerate(zip(self.plan.values(), rows, strict=True)):
            table[i, : len(pages)] = pages
            slots += [pages[p // size] * size + p % size for p in range(computed, computed + count)]
        lengths = np.array([sum(ordered) for ordered in self.plan.values()], np.int32)
        starts = np.cumsum([0, *(count for _, count in self.plan.values())]).astype(np.int32)
        return Tables(table, lengths, starts, np.array(slots, np.int64))


def output_of(step: Any, tokens: dict[str, list[int]], connector_output: Any = None) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    return ModelRunnerOutput(
        req_ids=list(tokens),
        req_id_to_index={request_id: i for i, request_id in enumerate(tokens)},
        sampled_token_ids=list(tokens.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=connector_output,
    )


@dataclass
class Life:
    """Random requests through a scheduler: shared prefixes, prompts in chunks, preemptions, aborts.

    Flagged requests end with the step in which they were.
    """

    scheduler: Any
    shapes: tuple[GroupShape, ...]
    seed: int
    in_flight: int = 1
    """Steps that are scheduled before the first of them is done."""
    seen: Counter[str] = field(default_factory=Counter)
    faults: dict[str, PageFault] = field(default_factory=dict)
    ending: set[str] = field(default_factory=set)
    """Flagged in a step that is not done yet."""

    def __post_init__(self) -> None:
        from kv_transfer.integrity.hooks import watch

        self.rnd = random.Random(self.seed)
        self.ledger = watch(self.scheduler.kv_cache_manager)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.checker = Checker(self.pool.num_gpu_blocks, self.shapes, now=lambda: 0.0)
        self.keeper = TableKeeper(self.shapes)
        self.hasher = hasher()
        self.prefixes = [[self.rnd.randrange(1000) for _ in range(n)] for n in (64, 96, 160, 224)]
        self._preempt = self.scheduler._preempt_request
        self.scheduler._preempt_request = self._count_preemption

    def _count_preemption(self, *args: Any, **kwargs: Any) -> None:
        self.seen["preempted"] += 1
        self._preempt(*args, **kwargs)

    def prompt(self) -> list[int]:
        prefix = self.rnd.choice(self.prefixes)
        if self.rnd.random() < 0.25:  # whole pages, or one token more or less
            return prefix + [7] * self.rnd.choice([0, 1, 31, 32, 33])
        return prefix[: self.rnd.randrange(20, len(prefix) + 1)] + [
            self.rnd.randrange(1000) for _ in range(self.rnd.randrange(1, 60))
        ]

    def add(self, number: int) -> None:
        salt = self.rnd.choice([None, "a", "b"])
        self.scheduler.add_request(
            a_request(f"r{number}", self.prompt(), self.rnd.randrange(4, 60), salt, self.hasher)
        )

    def run(self, requests: int) -> None:
        """Until all have ended."""
        from vllm.v1.request import RequestStatus

        left, flying = requests, deque[Any]()
        while left or self.scheduler.requests or flying:
            while left and len(self.scheduler.requests) < 14 and self.rnd.random() < 0.6:
                left -= 1
                self.add(left)
            if self.scheduler.requests and self.rnd.random() < 0.02:
                victim = self.rnd.choice(sorted(self.scheduler.requests))
                self.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
                self.seen["aborted"] += 1
            if len(flying) < self.in_flight and (left or self.scheduler.requests):
                flying.append(self.schedule())
            if flying and (len(flying) >= self.in_flight or not self.scheduler.requests):
                self.finish(*flying.popleft())

    def schedule(self) -> tuple[Any, dict[str, list[int]]]:
        """One step: scheduled, reconciled, and checked as a worker would."""
        from kv_transfer.integrity.hooks import reconcile

        step = self.scheduler.schedule()
        reconcile(self.ledger, self.scheduler)
        self._flag(self.ledger.take_flagged())
        self.seen["hits"] += sum(new.num_computed_tokens > 0 for new in step.scheduled_new_reqs)
        self.checker.apply(self.ledger.take_delta())
        self.keeper.take(step)
        for request_id in self.ending & self.keeper.plan.keys():  # these are not sent
            del self.keeper.plan[request_id]
            step.total_num_scheduled_tokens -= step.num_scheduled_tokens.pop(request_id)
        if self.keeper.plan:
            tables = list(enumerate(self.keeper.kernel_tables()))
            self._flag(self.checker.check(tables, list(self.keeper.plan), self.keeper.plan))
        tokens = {}
        for request_id, (computed, count) in self.keeper.plan.items():
            request = self.scheduler.requests[request_id]
            # Under asynchronous scheduling tokens of steps in flight are not known yet.
            done = computed + count >= request.num_prompt_tokens + request.num_output_tokens
            self.seen["chunks"] += not done
            tokens[request_id] = [self.rnd.randrange(1000)] if done and request_id not in self.ending else []
        return step, tokens

    def _flag(self, faults: dict[str, PageFault]) -> None:
        self.faults |= {r: fault for r, fault in faults.items() if r not in self.faults}
        self.ending |= faults.keys()

    def finish(self, step: Any, tokens: dict[str, list[int]]) -> None:
        from vllm.v1.request import RequestStatus

        for outputs in self.scheduler.update_from_output(step, output_of(step, tokens)).values():
            self.seen["ended"] += sum(output.finish_reason is not None for output in outputs.outputs)
        self.scheduler.kv_cache_manager.condemned.update(self.ending & self.scheduler.requests.keys())
        self.scheduler.finish_requests(self.ending, RequestStatus.FINISHED_ERROR)
        self.ending.clear()

    def balanced(self) -> None:
        """Nothing is left over, and the ledger knows it."""
        free = {block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()}
        assert free == set(range(1, self.pool.num_gpu_blocks))
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        assert free == {page for page in range(self.pool.num_gpu_blocks) if self.ledger.is_free(page)}
        assert self.ledger.rows == 0
        assert not any(self.ledger.owners(page) for page in free)
        assert len(self.checker.shadow) <= len(self.scheduler.requests) + 14  # told with the next step
        hashes = self.pool.cached_block_hash_to_block._cache.values()
        assert self.ledger.bindings == sum(len(v) if isinstance(v, dict) else 1 for v in hashes)
