"""The engine's part in `python -m load integrity-cost`: one engine in this process, stepped as it is told.

Lines of JSON come in and go out: a `Start`, answered by `Ready`, then any number of `Blocks`, `Plan` and
`Micro`, each answered by a list. The end of the input ends the program.

A block is so many decode steps with the ledger on (`generation`), with the ledger off (`null`), or of a plain
engine (`stock`). Steps between blocks, in which the ledger comes or goes and learns what is there, are not
measured, whether something changed or not.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

import msgspec

from kv_transfer.api.membership import Membership
from kv_transfer.connector.facade import PhasegateConnector
from kv_transfer.testing.micro import check_us
from kv_transfer.testing.switch import LedgerSwitch

Arm = Literal["generation", "null", "stock"]
_UNMEASURED: Final = 2
"""Steps before each block: the first tells the worker all, the second is like any other."""


class Start(msgspec.Struct, frozen=True):
    model: str
    """Folder."""
    dtype: str
    block_size: int
    concurrency: int
    """At most."""
    length: int
    """Tokens of a request, the prompt included, at most."""
    stock: bool
    """A plain engine, without anything of ours."""
    layers: int | None = None
    """Of the model, then with random weights; None: all, with its own."""


class Ready(msgspec.Struct, frozen=True):
    pages: int


class Blocks(msgspec.Struct, frozen=True, tag=True):
    """New requests, then these blocks one after another."""

    arms: tuple[Arm, ...]
    concurrency: int
    steps: int
    prompt_tokens: int
    seed: int


class Block(msgspec.Struct, frozen=True):
    arm: Arm
    step_s: tuple[float, ...]
    model_s: float
    """Of all steps: the model's own computation, which no ledger has a part in."""
    tokens: int
    worker_s: float
    """Of the check beside the model, in the measured steps."""
    checked: int
    unchecked: int
    """Steps."""
    pages: int
    """Compared."""


class Plan(msgspec.Struct, frozen=True, tag=True):
    """The scheduler alone, with made-up tokens in place of the model's: what the ledger costs beside it."""

    arms: tuple[Arm, ...]
    concurrency: int
    steps: int
    prompt_tokens: int
    seed: int


class Micro(msgspec.Struct, frozen=True, tag=True):
    """The check alone."""

    rows: int
    pages: int
    block_size: int


class Stopwatch:
    """How long some functions have run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class CostEngine:
    def __init__(self, start: Start, folder: Path) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**_arguments(start, folder)))
        gc.collect()
        gc.freeze()  # so that the collections before each block have little to look through
        self._core: Any = self._engine.engine_core.engine_core
        self._scheduler: Any = self._core.scheduler
        self._vocabulary = int(self._engine.model_config.get_vocab_size())
        self._length = start.length
        self._running: list[str] = []
        self._made = 0
        self._in_model = Stopwatch()
        (model,) = self._engine.apply_model(lambda model: model)
        model.forward = self._in_model.timing(model.forward)
        model.compute_logits = self._in_model.timing(model.compute_logits)
        self._switch: LedgerSwitch | None = None
        if not start.stock:
            connector = _worker_connector()
            self._check = connector.step_check
            self._switch = LedgerSwitch(self._scheduler, self._scheduler.connector.guard, self._check)

    @property
    def pages(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def blocks(self, order: Blocks) -> Iterator[Block]:
        self._begin(order)
        while any(request.num_output_tokens < 2 for request in self._scheduler.requests.values()):
            self._engine.step()
        for arm in order.arms:
            yield self._block(arm, order.steps)

    def _block(self, arm: Arm, steps: int) -> Block:
        self._set(arm)
        for _ in range(_UNMEASURED):
            self._engine.step()
        gc.collect()  # what the switch left behind would be collected in some measured step
        before, in_model = self._counts(), self._in_model.seconds
        times, tokens = [], 0
        for _ in range(steps):
            began = time.perf_counter()
            answers = self._engine.step()
            times.append(time.perf_counter() - began)
            tokens += len(answers)
        worker_s, checked, unchecked, pages = (a - b for a, b in zip(self._counts(), before, strict=True))
        in_model = self._in_model.seconds - in_model
        return Block(arm, tuple(times), in_model, tokens, worker_s, int(checked), int(unchecked), int(pages))

    def plan(self, order: Plan) -> list[tuple[Arm, float]]:
        """(arm, median seconds of a decode step: scheduling it, and taking in its tokens), by block."""
        found = []
        for arm in order.arms:
            self._begin(order)
            while any(request.num_output_tokens < 2 for request in self._scheduler.requests.values()):
                self._planned_step()
            self._set(arm)
            times = [self._planned_step() for _ in range(_UNMEASURED + order.steps)]
            found.append((arm, sorted(times[_UNMEASURED:])[order.steps // 2]))
        self._end()
        return found

    def _planned_step(self) -> float:
        began = time.perf_counter()
        step = self._scheduler.schedule()
        scheduled = time.perf_counter()
        output = _tokens_of(step, self._scheduler.requests)
        returned = time.perf_counter()
        self._scheduler.update_from_output(step, output)
        return time.perf_counter() - returned + scheduled - began

    def _begin(self, order: Blocks | Plan) -> None:
        from vllm import SamplingParams

        self._end()
        rnd = Random(order.seed)
        sampling = SamplingParams(max_tokens=self._length, ignore_eos=True, temperature=0.0, detokenize=False)
        for _ in range(order.concurrency):
            self._made += 1
            prompt = [rnd.randrange(self._vocabulary) for _ in range(order.prompt_tokens)]
            self._running.append(f"r{self._made}")
            self._engine.add_request(self._running[-1], {"prompt_token_ids": prompt}, sampling)

    def _end(self) -> None:
        if self._switch is not None:  # first: what the ledger has to tell of planned steps is told to nobody
            self._switch.set(on=False)
        self._engine.abort_request(self._running)
        self._running.clear()
        while self._scheduler.has_requests():
            self._engine.step()

    def _set(self, arm: Arm) -> None:
        if (self._switch is None) != (arm == "stock"):
            raise ValueError(f"this engine cannot run as {arm}")
        if self._switch is not None:
            self._switch.set(on=arm == "generation")

    def _counts(self) -> tuple[float, int, int, int]:
        if self._switch is None:
            return 0.0, 0, 0, 0
        counts = self._check.counts
        return counts.seconds, counts.steps, counts.unchecked, counts.pages


def _worker_connector() -> PhasegateConnector:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()
    assert isinstance(connector, PhasegateConnector)
    return connector


def _tokens_of(step: Any, requests: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[
            [7] if requests[r].num_computed_tokens >= requests[r].num_prompt_tokens else [] for r in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def _arguments(start: Start, folder: Path) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": start.model,
        "dtype": start.dtype,
        "max_model_len": start.length,
        "block_size": start.block_size,
        "max_num_seqs": start.concurrency,
        "distributed_executor_backend": "uni",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "sha256_cbor",
        "async_scheduling": False,
        "enforce_eager": True,
        "disable_log_stats": True,
    }
    if start.layers is not None:
        arguments |= {"hf_overrides": {"num_hidden_layers": start.layers}, "load_format": "dummy"}
    if start.stock:
        return arguments
    from vllm.config import KVTransferConfig

    keys = folder / "membership"
    Membership.mint().write(keys)
    return arguments | {
        "worker_cls": "kv_transfer.connector.worker.PhasegateCPUWorker",
        "scheduler_cls": "kv_transfer.connector.scheduler.PhasegateScheduler",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="PhasegateConnector",
            kv_connector_module_path="kv_transfer.connector.facade",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "engine_id": "0" * 32,
                "bind_host": "127.0.0.1",
                "backend": "gloo",
                "gauges_endpoint": f"ipc://{folder}/gauges",
                "membership_file": str(keys),
            },
        ),
    }


def answer(engine: CostEngine, order: Blocks | Plan | Micro) -> Sequence[Any]:
    if isinstance(order, Blocks):
        return list(engine.blocks(order))
    if isinstance(order, Plan):
        return engine.plan(order)
    return check_us(order.rows, order.pages, order.block_size)


def main() -> None:
    # Whatever prints meanwhile must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    orders = msgspec.json.Decoder(Blocks | Plan | Micro)
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        engine = CostEngine(msgspec.json.decode(sys.stdin.buffer.readline(), type=Start), Path(folder))
        answers.write(msgspec.json.encode(Ready(engine.pages)) + b"\n")
        for line in sys.stdin.buffer:
            answers.write(msgspec.json.encode(answer(engine, orders.decode(line))) + b"\n")


if __name__ == "__main__":
    main()
