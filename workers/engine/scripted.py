"""An engine that computes nothing: made-up answers at a given pace, with real pages and real batching.

It stands where vLLM stands, so that everything around engines can be developed and measured without a model:
gateway, token bus, routing, aborts. Requests share a step, wait for places and pages, are preempted, hit the
prefix cache. What it does not do: no bytes are moved between engines, so no request reports a transfer, and
decode spends the time of the prompt itself.
"""

import asyncio
import hashlib
import json
import logging
import re
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from kv_transfer.api import EngineGauges, HandoffOutcome, HandoffReport, LedgerSnapshot, Ticket
from workers.api import DecodeRequest, FaultKind, Phase, PrefillRequest, Sampling
from workers.engine.base import Delta, Ending, EngineFault, Prefilled
from workers.engine.scripted_batch import Batch, Output, Sequence, Work
from workers.engine.scripted_pages import Pages
from workers.profile.schema import ModelProfile, Script

_USUAL_BATCHED_TOKENS: Final = 2048
_WORD: Final = re.compile(r"Ġ?[A-Za-z]{2,}")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    size: int
    words: tuple[int, ...]
    """Tokens that are a word or a part of one: the answers are made of these."""


def read_vocabulary(model_dir: Path) -> Vocabulary:
    """From the model's tokenizer.

    Raises:
        EngineFault: the folder has none that can be read.
    """
    try:
        known = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
        size = int(json.loads((model_dir / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as bad:
        raise EngineFault(FaultKind.ENGINE_DEAD, f"no vocabulary in {model_dir}: {bad!r}") from bad
    words = tuple(sorted(number for text, number in known.items() if _WORD.fullmatch(text)))
    if not words:
        raise EngineFault(FaultKind.ENGINE_DEAD, f"no words in the vocabulary of {model_dir}")
    return Vocabulary(size, words)


def duration_s(script: Script, work: Work) -> float:
    """How long the step takes."""
    spent_ms = (
        script.base_ms
        + script.per_sequence_ms * work.sequences
        + script.per_prefill_token_ms * work.prefill_tokens
    )
    return spent_ms / 1000


def answer(words: tuple[int, ...], token_ids: tuple[int, ...], sampling: Sampling) -> Iterator[int]:
    """The made-up answer: the same for the same prompt, and for the same seed where the seed matters."""
    seed = sampling.seed if sampling.temperature > 0 else None
    digest = hashlib.blake2b(array("q", token_ids).tobytes() + repr(seed).encode(), digest_size=8)
    draw, count = Random(digest.digest()).random, len(words)
    while True:
        yield words[int(draw() * count)]


@dataclass(eq=False, slots=True)
class _Inside:
    """A request in the engine, and the news that it has not taken yet."""

    sequence: Sequence
    news: list[Output] = field(default_factory=list)
    fault: EngineFault | None = None
    """Nothing comes any more."""
    waiter: asyncio.Future[None] | None = None

    def tell(self, output: Output) -> None:
        self.news.append(output)
        self._wake()

    def fail(self, fault: EngineFault) -> None:
        self.fault = fault
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def take(self) -> list[Output]:
        """What came since the last time; waits while that is nothing.

        Raises:
            EngineFault: the engine has ended.
        """
        if not self.news and self.fault is None:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        if self.fault is not None and not self.news:
            raise self.fault
        outputs, self.news = self.news, []
        return outputs


class ScriptedEngine:
    """One engine of one phase, on the caller's event loop."""

    def __init__(
        self,
        profile: ModelProfile,
        phase: Phase,
        *,
        model_dir: str,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            model_dir: folder with the tokenizer; weights are not read.
            now: monotonic seconds.
        """
        part = profile.phase(phase)
        self._profile = profile
        self._script = part.script or Script()
        self._model_dir = Path(model_dir)
        self._now = now
        self._sleep = sleep
        self._batch = Batch(
            max_sequences=part.max_sequences,
            max_batched_tokens=part.max_batched_tokens or _USUAL_BATCHED_TOKENS,
            context_length=profile.context_length,
        )
        self._vocabulary: Vocabulary | None = None
        self._pages: Pages | None = None
        self._inside: dict[Sequence, _Inside] = {}
        self._work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._vocabulary = await asyncio.to_thread(read_vocabulary, self._model_dir)
        self._pages = await asyncio.to_thread(Pages, self._script.pages, self._profile.block_size)
        self._stepping = asyncio.create_task(self._steps(), name="scripted-engine")

    async def prefill(self, request: PrefillRequest, ticket: Ticket) -> Prefilled:
        sampling = Sampling(max_tokens=1, temperature=0.0)
        inside = self._enter(request.request_id, request.token_ids, request.cache_salt, sampling, ())
        try:
            await inside.take()
        finally:
            self._leave(inside)
        return Prefilled(cached_tokens=inside.sequence.cached_tokens or 0)

    async def decode(self, request: DecodeRequest, ticket: Ticket | None) -> AsyncGenerator[Delta, None]:
        engine_id = f"{request.request_id}.{request.attempt}"
        inside = self._enter(
            engine_id, request.token_ids, request.cache_salt, request.sampling, request.stop_token_ids
        )
        try:
            while True:
                outputs = await inside.take()
                token_ids = tuple([output.token_id for output in outputs])
                finish = outputs[-1].finish
                if finish is None:
                    yield Delta(token_ids=token_ids)
                    continue
                cached = inside.sequence.cached_tokens or 0
                ending = Ending(
                    reason=finish,
                    cached_tokens=cached,
                    handoff=_handoff(ticket, cached, len(request.token_ids)),
                )
                yield Delta(token_ids=token_ids, ending=ending)
                return
        finally:
            self._leave(inside)

    def _enter(
        self,
        engine_id: str,
        token_ids: tuple[int, ...],
        cache_salt: str,
        sampling: Sampling,
        stop_token_ids: tuple[int, ...],
    ) -> _Inside:
        if self._pages is None or self._vocabulary is None or self._stepping is None or self.dead:
            raise EngineFault(FaultKind.ENGINE_DEAD, "the engine is not running")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocabulary.size:
            raise EngineFault(FaultKind.INVALID_REQUEST, "token_ids: empty, or outside the vocabulary")
        if len(token_ids) >= self._profile.context_length:
            raise EngineFault(
                FaultKind.INVALID_REQUEST,
                f"token_ids: {len(token_ids)} leave no room for an answer in {self._profile.context_length}",
            )
        sequence = Sequence(
            holder=self._pages.holder(engine_id, token_ids, cache_salt),
            script=answer(self._vocabulary.words, token_ids, sampling),
            max_tokens=sampling.max_tokens,
            stop_token_ids=frozenset(stop_token_ids),
        )
        inside = self._inside[sequence] = _Inside(sequence)
        self._batch.add(sequence)
        self._work.set()
        return inside

    def _leave(self, inside: _Inside) -> None:
        self._batch.remove(inside.sequence)
        self._inside.pop(inside.sequence, None)

    async def _steps(self) -> None:
        """Step after step, while there is work. A step begins when the one before was due to end."""
        due = self._now()
        try:
            while True:
                work = self._batch.schedule()
                if work is None:
                    self._work.clear()
                    await self._work.wait()
                    due = self._now()
                    continue
                spent = duration_s(self._script, work)
                due = max(due + spent, self._now())
                await self._sleep(due - self._now())
                for output in self._batch.complete():
                    self._inside[output.sequence].tell(output)
        except Exception:
            log.exception("scripted engine: the step loop failed")
            raise
        finally:
            for inside in self._inside.values():
                inside.fail(EngineFault(FaultKind.ENGINE_DEAD, "the engine has ended"))

    async def release(self, transfer_id: str) -> None:
        """Pages are never held for others here."""

    async def gauges(self) -> EngineGauges:
        if self._pages is None or self._stepping is None or self.dead:
            raise EngineFault(FaultKind.ENGINE_DEAD, "the engine is not running")
        return EngineGauges(
            free_pages=self._pages.free,
            total_pages=self._pages.total,
            running=self._batch.running,
            waiting=self._batch.waiting,
            preemptions=self._batch.preemptions,
            in_flight_transfers=0,
            control_addresses=(),  # nobody fetches pages here
            page_bytes=0,  # pages hold nothing
            block_size=self._profile.block_size,
        )

    async def ledger(self) -> LedgerSnapshot:
        return LedgerSnapshot(ledger="null")  # pages hold nothing, and nobody keeps a ledger of them

    @property
    def dead(self) -> bool:
        return self._stepping is not None and self._stepping.done()

    async def close(self) -> None:
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.cancel()
            await asyncio.wait([stepping])


def _handoff(ticket: Ticket | None, cached_tokens: int, prompt_tokens: int) -> HandoffReport | None:
    """No bytes are moved here: either none were needed, or there was no transfer."""
    if ticket is not None and cached_tokens >= prompt_tokens - 1:
        return HandoffReport(outcome=HandoffOutcome.NOTHING_MISSING)
    return None
