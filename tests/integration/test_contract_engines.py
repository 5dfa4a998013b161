"""Real engines in real replicas that must not share pages: another RoPE, and bits of another type."""

import asyncio
import json
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from kv_transfer.api import HandoffOutcome, TransferCause
from tests.support.members import MEMBERSHIP
from tests.support.replicas import MemoryRegistry, SinkBoard, a_decode, a_prefill
from tests.support.tiny_model import random_llama
from workers.api import DecodeResult, FaultKind, PrefillResult, Sampling, WorkerFault
from workers.engine.vllm_engine import VllmEngine
from workers.pools.config import ReplicaConfig
from workers.pools.decode import DecodeReplica
from workers.pools.prefill import PrefillReplica
from workers.pools.replica import Parts, Replica
from workers.profile.fingerprint import contract_of
from workers.profile.schema import dump_profile, parse_profile

pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

R = TypeVar("R", bound=Replica)
PROMPT = tuple(range(100, 200))
"""Three whole pages and a bit."""
TOKENS = 8


@dataclass
class Replicas:
    prefill: PrefillReplica
    same: DecodeReplica
    """Of the same folder and type."""
    roped: DecodeReplica
    """Of the same weights with another theta."""
    halves: DecodeReplica
    """Of the same folder, its cache in FP16."""
    board: SinkBoard

    async def answer(
        self, decode: DecodeReplica, *, alone: bool = False
    ) -> tuple[list[int], DecodeResult | WorkerFault]:
        """One request, dispatched to both at once as a gateway does. Nothing of it is cached before."""
        request_id, transfer_id, salt = secrets.token_hex(16), secrets.token_hex(16), secrets.token_hex(8)
        usual: dict[str, Any] = {"token_ids": PROMPT, "cache_salt": salt}
        source = (
            {} if alone else {"transfer_id": transfer_id, "prefill_engine": self.prefill._parts.engine_id}
        )
        decoding = decode.decode(
            a_decode(request_id, sampling=Sampling(max_tokens=TOKENS, temperature=0.0), **usual, **source)
        )
        if alone:
            result = await decoding
        else:
            to = decode._parts.engine_id
            announce = a_prefill(request_id, transfer_id=transfer_id, decode_engine=to, **usual)
            done, result = await asyncio.gather(self.prefill.prefill(announce), decoding)
            assert isinstance(done, PrefillResult)
        return self.board["tcp://g1"].tokens_of(request_id), result

    async def idle(self) -> bool:
        for _ in range(100):
            states = [await each.status() for each in (self.prefill, self.same, self.roped, self.halves)]
            if all(s.free_pages == s.total_pages and not s.in_flight_transfers for s in states):
                return True
            await asyncio.sleep(0.1)
        return False


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replicas(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replicas]:
    folder = random_llama(tmp_path_factory.mktemp("model"))
    roped = Path(shutil.copytree(folder, folder.parent / "roped"))
    config = json.loads((roped / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 10
    (roped / "config.json").write_text(json.dumps(config))
    registry, board = MemoryRegistry(), SinkBoard()
    async with AsyncExitStack() as stack:

        async def started(kind: type[R], model: Path, **phase: Any) -> R:
            replica = _replica(kind, model, registry, board, phase)
            await replica.start()
            stack.push_async_callback(replica.stop)
            return replica

        half = {"dtype": "float16", "kv_format": "fp16"}
        yield Replicas(
            prefill=await started(PrefillReplica, folder),
            same=await started(DecodeReplica, folder),
            roped=await started(DecodeReplica, roped),
            halves=await started(DecodeReplica, folder, **half),
            board=board,
        )


def _replica(
    kind: type[R], model: Path, registry: MemoryRegistry, board: SinkBoard, phase: dict[str, Any]
) -> R:
    profile = parse_profile(
        {
            "name": "tiny",
            "model_id": "tiny",
            "weights": {"path": str(model)},
            "context_length": 512,
            # Each replica of this test has a profile of its own: no single one may hold such a pair.
            **{name: {"dtype": "bfloat16", **phase} for name in ("prefill", "decode")},
        },
        source="tiny",
    )
    engine_id, contract = secrets.token_hex(16), contract_of(profile, model)
    engine = VllmEngine(
        profile,
        kind.phase,
        model_dir=str(model),
        engine_id=engine_id,
        host="127.0.0.1",
        device="cpu",
        contract=contract,
        membership=MEMBERSHIP,
        faults={},
    )
    parts = Parts(
        engine=engine,
        engine_id=engine_id,
        replica_id=f"{kind.phase}-{engine_id[:4]}",
        contract=contract,
        read_contract=lambda: contract_of(profile, model),
        registry=registry,
        open_sink=board.open,
    )
    return kind(ReplicaConfig(profile=dump_profile(profile), model_dir=str(model)), parts)


async def test_engines_of_one_contract_and_type_share_pages(replicas: Replicas) -> None:
    """What follows is known to be refused for its differences."""
    own, _ = await replicas.answer(replicas.same, alone=True)
    tokens, result = await replicas.answer(replicas.same)

    assert isinstance(result, DecodeResult)
    assert result.handoff is not None
    assert result.handoff.outcome is HandoffOutcome.SHIPPED
    assert tokens == own
    assert len(tokens) == TOKENS


async def test_decode_with_another_rope_answers_nothing_and_says_what_differs(replicas: Replicas) -> None:
    tokens, fault = await replicas.answer(replicas.roped)

    assert fault == WorkerFault(
        kind=FaultKind.CONTRACT_MISMATCH,
        detail="prefill and decode differ in rope: theta 10000 against 100000",
    )
    assert tokens == []
    assert await replicas.idle()


async def test_the_other_rope_would_have_made_another_answer(replicas: Replicas) -> None:
    same, _ = await replicas.answer(replicas.same, alone=True)
    roped, _ = await replicas.answer(replicas.roped, alone=True)

    assert same != roped


async def test_bits_of_bf16_are_never_read_as_fp16(replicas: Replicas) -> None:
    """Decode computes the prompt itself: its answer is that of the engine alone."""
    own, _ = await replicas.answer(replicas.halves, alone=True)
    tokens, result = await replicas.answer(replicas.halves)

    assert isinstance(result, DecodeResult)
    report = result.handoff
    assert report is not None
    assert (report.outcome, report.cause, report.pages) == (
        HandoffOutcome.RECOMPUTED,
        TransferCause.LAYOUT_MISMATCH,
        0,
    )
    assert report.detail.startswith("format: bf16 != fp16")  # with AMX their interiors differ, too
    assert "(prefill: bf16, 2 layers, 2 heads, 32 slots" in report.detail
    assert "decode: fp16, 2 layers, 2 heads, 32 slots" in report.detail
    assert tokens == own
    assert await replicas.idle()
