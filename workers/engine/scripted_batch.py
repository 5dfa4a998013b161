"""Which requests of the scripted engine take part in a step: continuous batching in the manner of vLLM.

No clock and no I/O: `schedule` says how much work the step has, `complete` what came of it.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from workers.api import FinishReason
from workers.engine.scripted_pages import Holder


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One request in the batch."""

    holder: Holder
    script: Iterator[int]
    """Its answer, token by token, without end."""
    max_tokens: int
    stop_token_ids: frozenset[int]
    produced: int = 0
    computed: int = 0
    """Tokens whose pages are filled."""
    scheduled: int = 0
    """Tokens that the running step computes."""
    cached_tokens: int | None = None
    """Found in the prefix cache when it was first admitted."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one step computes."""

    sequences: int
    prefill_tokens: int


class Output(msgspec.Struct, frozen=True):
    """One token. A dataclass would cost more to make."""

    sequence: Sequence
    token_id: int
    finish: FinishReason | None


class Batch:
    """Requests that run, and requests that wait for a place or for pages, first come first served."""

    def __init__(self, *, max_sequences: int, max_batched_tokens: int, context_length: int) -> None:
        self._max_sequences = max_sequences
        self._max_batched_tokens = max_batched_tokens
        self._context_length = context_length
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a request out, also in the middle of a step. Who is not inside is no mistake."""
        if sequence in self._running:
            self._running.remove(sequence)
            sequence.holder.release()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def schedule(self) -> Work | None:
        """Choose the next step's work, with pages for all of it; None when there is nothing to do."""
        before = self.preemptions
        budget = self._continue_running()
        # After a preemption nobody enters in the same step: pages would go round in circles.
        while (
            self.preemptions == before
            and self._waiting
            and len(self._running) < self._max_sequences
            and budget > 0
        ):
            sequence = self._waiting[0]
            if not self._admit(sequence, budget):
                break
            budget -= sequence.scheduled
            self._running.append(self._waiting.popleft())
        taking_part = [sequence for sequence in self._running if sequence.scheduled]
        if not taking_part:
            return None
        return Work(
            sequences=len(taking_part),
            prefill_tokens=sum(s.scheduled for s in taking_part if s.scheduled > 1 or not s.produced),
        )

    def complete(self) -> list[Output]:
        """End the step: a token for every request whose prompt is computed."""
        outputs = []
        for sequence in list(self._running):
            sequence.computed += sequence.scheduled
            sequence.scheduled = 0
            sequence.holder.publish(sequence.computed)
            if sequence.computed == sequence.holder.tokens:
                outputs.append(self._sample(sequence))
        return outputs

    def _continue_running(self) -> int:
        """Give running requests their share, the oldest first; returns what remains of the step."""
        budget = self._max_batched_tokens
        place = 0
        while place < len(self._running):
            sequence = self._running[place]
            wanted = min(sequence.holder.tokens - sequence.computed, budget)
            if sequence.holder.grow(sequence.computed + wanted):
                sequence.scheduled = wanted
                budget -= wanted
                place += 1
            else:
                self._preempt(self._running[-1])  # the youngest; maybe this one itself
        return budget

    def _preempt(self, sequence: Sequence) -> None:
        """Its pages go to others; later it computes its prompt and what it has answered so far again."""
        self._running.remove(sequence)
        sequence.holder.release()
        sequence.computed = sequence.scheduled = 0
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        cached = sequence.holder.take_cached()
        wanted = min(sequence.holder.tokens - cached, budget)
        if not sequence.holder.grow(cached + wanted):
            sequence.holder.release()
            return False
        sequence.computed, sequence.scheduled = cached, wanted
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
        return True

    def _sample(self, sequence: Sequence) -> Output:
        token_id = next(sequence.script)
        sequence.holder.append(token_id)
        sequence.produced += 1
        finish = None
        if token_id in sequence.stop_token_ids:
            finish = FinishReason.STOP
        elif sequence.produced == sequence.max_tokens or sequence.holder.tokens == self._context_length:
            finish = FinishReason.LENGTH
        if finish is not None:
            self.remove(sequence)
        return Output(sequence, token_id, finish)
