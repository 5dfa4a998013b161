"""One real engine with a tiny model, in a process of its own, on which scenes are played with page faults.

    python -m tests.support.cell_engine on|off [MODEL_DIR]     one `Scene` a line in, one `Played` a line out

Each scene begins in the same state: no request, no hash, pages in order. So two runs of one scene differ only
by the fault.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from kv_transfer.api import HandoffReport, Role, Ticket
from kv_transfer.api.integrity import PageFault
from kv_transfer.testing.armed import arm, disarm, landed
from tests.support.cell_words import BATCHED, CONTEXT, PAGE, PAGES, Answer, Ask, Played, Scene
from tests.support.members import membership_file
from tests.support.tiny_model import random_llama
from workers.api import Phase
from workers.profile.schema import parse_profile
from workers.profile.vllm_args import engine_args, engine_environment

ROOT: Final = Path(__file__).parents[2]
ENGINE: Final = "e" * 32
MOST_STEPS: Final = 20_000


class CellEngine:
    def __init__(self, folder: Path, model_dir: str, *, integrity: bool) -> None:
        self._integrity = integrity
        self._faults = folder / "faults"
        self._faults.mkdir()
        self._engine = _engine(folder, self._faults, model_dir, integrity=integrity)
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._guard = self._scheduler.connector.guard
        self._address = self._scheduler.connector._s._gauges._workers[0].control

    def play(self, scene: Scene) -> Played:
        disarm(self._faults)
        self._in_order()
        connector = self._connector()
        connector.steps.clear()
        for number, order in enumerate(scene.faults):
            arm(self._faults, f"fault{number}", order)
        before = Counter(self._guard.mismatches())
        answers: dict[str, Answer] = {}
        died = ""
        try:
            self._run(scene, answers)
        except Exception as broken:  # noqa: BLE001 - what a fault does to an engine that checks nothing
            died = f"{type(broken).__name__}: {broken}"
        pool = self._scheduler.kv_cache_manager.block_pool
        free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
        return Played(
            answers=answers,
            steps=[{_name(r): given for r, given in step.items()} for step in connector.steps],
            landed=landed(self._faults),
            mismatches={c.value: n for c, n in (self._guard.mismatches() - before).items()},
            died=died,
            missing=pool.num_gpu_blocks - 1 - len(free),
            referenced=sum(block.ref_cnt != 0 for block in pool.blocks if not block.is_null),
            remembered=getattr(self._guard.ledger, "rows", 0),
        )

    def _run(self, scene: Scene, answers: dict[str, Answer]) -> None:
        waiting = list(scene.asks)
        steps = 0
        while waiting or self._engine.has_unfinished_requests() or self._scheduler.requests:
            for ask in [a for a in waiting if steps >= a.at and (not a.after or a.after in answers)]:
                waiting.remove(ask)
                self._add(ask)
            for output in self._engine.step():
                if output.finished:
                    answers[output.request_id] = _answer(output)
            steps += 1
            assert steps < MOST_STEPS, f"hangs: {sorted(self._scheduler.requests)}"

    def _add(self, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        role = Role.SEND if ask.sends else Role.RECEIVE
        ticket = Ticket(
            transfer_id=ask.sends or ask.fetches,
            role=role,
            peer_engine=ENGINE,
            peer_addresses=(self._address,) if role is Role.RECEIVE else (),
            deadline_s=ask.deadline_s,
        )
        params = SamplingParams(
            max_tokens=ask.tokens,
            temperature=0.0,
            logprobs=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": ticket.to_params()} if ticket.transfer_id else None,
        )
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
        if ask.salt:
            prompt["cache_salt"] = ask.salt
        self._engine.add_request(ask.name, prompt, params)

    def _in_order(self) -> None:
        assert not self._scheduler.requests
        if not self._integrity:
            self._repair()
        assert self._scheduler.reset_prefix_cache()
        queue = self._scheduler.kv_cache_manager.block_pool.free_block_queue
        pages = queue.popleft_n(queue.num_free_blocks)
        queue.append_n(sorted(pages, key=lambda block: int(block.block_id)))

    def _repair(self) -> None:
        """What faults have left behind where nobody checked."""
        from vllm.v1.core.block_pool import BlockHashToBlockMap
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        pool = self._scheduler.kv_cache_manager.block_pool
        blocks = [block for block in pool.blocks if not block.is_null]
        for block in blocks:
            block.ref_cnt = 0
            block.reset_hash()
        pool.cached_block_hash_to_block = BlockHashToBlockMap()
        pool.free_block_queue = FreeKVCacheBlockQueue(blocks)

    def _connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()


def _answer(output: Any) -> Answer:
    (of,) = output.outputs
    fault = PageFault.from_params(output.kv_transfer_params)
    report = HandoffReport.from_params(output.kv_transfer_params)
    return Answer(
        tokens=tuple(of.token_ids),
        logprobs=tuple(by[token].logprob for by, token in zip(of.logprobs or (), of.token_ids, strict=False)),
        reason=str(of.finish_reason),
        cause=fault.cause.value if fault else "",
        handoff=report.cause or report.outcome if report else "",
    )


def _name(request_id: str) -> str:
    return request_id.split("-", maxsplit=1)[0]


def _engine(folder: Path, faults: Path, model_dir: str, *, integrity: bool) -> Any:
    """As a prefill replica would start it, with a small cache."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    connector = {
        "engine_id": ENGINE,
        "bind_host": "127.0.0.1",
        "backend": "gloo",
        "gauges_endpoint": f"ipc://{folder}/gauges",
        "membership_file": membership_file(folder),
        "integrity": integrity,
        "faults": {"page_faults": str(faults)},
    }
    arguments = engine_args(
        _profile(), Phase.PREFILL, model_dir or str(random_llama(folder)), ENGINE, connector
    ) | {
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": BATCHED,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": PAGES,
        "block_size": PAGE,
    }
    transfer = arguments["kv_transfer_config"] | {
        "kv_connector": "WatchedConnector",
        "kv_connector_module_path": "tests.support.watched_connector",
    }
    return LLMEngine.from_engine_args(
        EngineArgs(**arguments | {"kv_transfer_config": KVTransferConfig(**transfer)})
    )


def _profile() -> Any:
    return parse_profile(yaml.safe_load((ROOT / "deploy/models/exact.yaml").read_text()), source="exact")


def main() -> None:
    os.environ.update(engine_environment(_profile(), Phase.PREFILL, "cpu", "127.0.0.1"))
    mode, model_dir = (*sys.argv[1:], "")[:2]
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        engine = CellEngine(Path(folder), model_dir, integrity=mode == "on")
        for line in sys.stdin.buffer:
            played = engine.play(msgspec.json.decode(line, type=Scene))
            sys.stdout.buffer.write(b"\n" + msgspec.json.encode(played) + b"\n")
            sys.stdout.buffer.flush()
    os._exit(0)  # vLLM's own way out collects garbage for seconds; nothing outlives the process


if __name__ == "__main__":
    main()
