"""An engine of two tensor-parallel workers, one of which gets a wrong table.

python -m tests.support.two_ranks > [rounds]
"""

import secrets
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from kv_transfer.api import PageFault
from tests.support.small_engine import small_engine
from tests.support.tiny_model import random_llama

SPOILT_RANK: Final = 1
PROMPTS: Final = {
    name: [3 + (7 * i + ord(name) * 31) % 1000 for i in range(length)]
    for name, length in (("a", 75), ("b", 80), ("c", 70))
}
ANSWER_TOKENS: Final = 16


@dataclass(slots=True)
class Answered:
    tokens: list[int]
    logprobs: list[float]
    reason: str
    cause: str | None


@dataclass(slots=True)
class Round:
    answers: dict[str, Answered] = field(default_factory=dict)
    mismatches: dict[str, int] = field(default_factory=dict)
    steps_unchecked: int = 0
    pages_missing: int = 0
    ledger_rows: int = 0


class TwoRanks:
    def __init__(self, folder: Path) -> None:
        self._engine = small_engine(
            random_llama(folder),
            folder,
            secrets.token_hex(16),
            max_model_len=512,
            num_gpu_blocks_override=40,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self.on_ranks: Callable[..., Any] = core.model_executor.collective_rpc

    def round(self, *, spoil: bool) -> Round:
        """All prompts at once, under a salt of their own; `a` may get a wrong table after four tokens."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=ANSWER_TOKENS,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        salt = secrets.token_hex(4)
        before = self._scheduler.connector.guard.mismatches()
        ids = {
            name: self._engine.add_request(name, {"prompt_token_ids": text, "cache_salt": salt}, params)
            for name, text in PROMPTS.items()
        }
        done = Round()
        steps = 0
        while self._engine.has_unfinished_requests() or self._scheduler.requests:
            for output in self._engine.step():
                done.answers[output.request_id] = _answered(output)
            steps += 1
            if spoil and steps == 4:
                self.on_ranks(spoil_table, args=(ids["a"], ids["b"]))
            assert steps < 200, "hangs"
        self._account(done, before)
        return done

    def _account(self, done: Round, before: Any) -> None:
        guard, pool = self._scheduler.connector.guard, self._scheduler.kv_cache_manager.block_pool
        done.mismatches = {cause.value: count for cause, count in (guard.mismatches() - before).items()}
        done.steps_unchecked = guard.counts.unchecked
        done.pages_missing = pool.num_gpu_blocks - 1 - len(pool.free_block_queue.get_all_free_blocks())
        done.ledger_rows = guard.ledger.rows

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def _answered(output: Any) -> Answered:
    part = output.outputs[0]
    fault = PageFault.from_params(output.kv_transfer_params)
    return Answered(
        list(part.token_ids),
        [found[token].logprob for found, token in zip(part.logprobs, part.token_ids, strict=True)],
        str(part.finish_reason),
        None if fault is None else fault.cause.value,
    )


# What follows runs in the workers.


def spoil_table(worker: Any, victim: str, other: str) -> None:
    """The victim's first entry shows the other's page, on one rank, from the next step on."""
    if worker.rank == SPOILT_RANK:
        batch = worker.model_runner.input_batch
        table = batch.block_table.block_tables[0].block_table.np
        table[batch.req_id_to_index[victim], 0] = table[batch.req_id_to_index[other], 0]


def look_away(worker: Any) -> None:
    """From now on this rank finds nothing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    if worker.rank == SPOILT_RANK:
        checker = get_kv_transfer_group()._w.check._checker
        checker.check = lambda *_args, **_words: {}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        ranks = TwoRanks(Path(folder))
        rounds = {"right": ranks.round(spoil=False), "spoilt": ranks.round(spoil=True)}
        rounds["after"] = ranks.round(spoil=False)
        ranks.on_ranks(look_away)
        rounds["unchecked"] = ranks.round(spoil=True)
        ranks.close()
    sys.stdout.write("\n" + msgspec.json.encode(rounds).decode() + "\n")


if __name__ == "__main__":
    main()
