"""A slow witness of what each page really holds, beside an engine whose model is nothing but its cache.

The witness follows every slot: whose text was written there, up to which token, and whether it was computed
from a right reading. It knows nothing of tags, ledgers, hashes or tables but what the model itself is given.
So it can say of every row whether it read what its own text calls for: the token that is made of a wrong
reading is one that no right answer has.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash

from kv_transfer.api.integrity import PageFault
from kv_transfer.connector.scheduler import PhasegateAsyncScheduler, PhasegateScheduler
from kv_transfer.integrity.ledger import GenerationLedger
from kv_transfer.integrity.verify import Tables
from tests.support.real_scheduler import BLOCK
from tests.support.toy_engine import ToyEngine, digest

NOTHING: Final = 0
"""What a slot holds that nobody wrote, or that was computed from a wrong reading; no text has this key."""
WRONG_TOKEN: Final = 1000
"""Right answers have smaller ones."""


def keys_of(text: Sequence[int]) -> list[int]:
    """One for each token: of the text up to it."""
    keys, last = [], 1
    for token in text:
        last = hash((last, token)) or 1
        keys.append(last)
    return keys


@dataclass
class _Row:
    """A request's part in a step."""

    name: str
    keys: list[int]
    """Of its text up to the last token that is computed."""
    computed: int
    given: list[int]
    """Pages, as the tables said before anything was masked."""
    read: list[int]
    """Pages, as the model reads them."""
    slots: list[int]
    """It writes to; negative for nowhere."""
    wrong_from: int
    """First token that is computed from a wrong reading; the text's length if none is."""


class Witness:
    def __init__(self, pages: int) -> None:
        self.holds = [NOTHING] * (pages * BLOCK)
        self.misled: set[str] = set()
        """Requests whose tables led to something else than their text; who is masked in vain is not one."""

    def forward(self, rows: Sequence[_Row], taken_out: Sequence[_Row], spoilt: set[str]) -> None:
        """
        Args:
            taken_out: requests that were scheduled for this step, and are not in it.
            spoilt: requests that a fault befell in this step.
        """
        for row in rows:
            for position, slot in enumerate(row.slots, row.computed):
                if slot >= 0:
                    self.holds[slot] = row.keys[position] if position < row.wrong_from else NOTHING
        changed = True
        while changed:  # rows read what others write in the same step
            changed = False
            for row in rows:
                wrong = self._first_wrong(row.keys, row.read, len(row.keys))
                if wrong < row.wrong_from:
                    row.wrong_from, changed = wrong, True
                    for slot in row.slots[max(0, wrong - row.computed) :]:
                        if slot >= 0:
                            self.holds[slot] = NOTHING
        self.misled |= spoilt
        for row in (*rows, *taken_out):
            if self._first_wrong(row.keys, row.given, row.computed) < row.computed:
                self.misled.add(row.name)

    def _first_wrong(self, keys: Sequence[int], pages: Sequence[int], end: int) -> int:
        for position in range(end):
            page = pages[position // BLOCK]
            if self.holds[page * BLOCK + position % BLOCK] != keys[position]:
                return position
        return len(keys)

    def forget(self, page: int) -> None:
        """It begins another life: that it still holds a text that is called for would be luck."""
        self.holds[page * BLOCK : (page + 1) * BLOCK] = [NOTHING] * BLOCK

    def holds_text(self, page: int, keys: Sequence[int]) -> bool:
        return self.holds[page * BLOCK : (page + 1) * BLOCK] == list(keys)


class WitnessedEngine(ToyEngine):
    """Its tokens tell whether what was read was right."""

    def __init__(self, config: Any, pages: int, *, ahead: bool, on_device: bool) -> None:
        kind = PhasegateAsyncScheduler if ahead else PhasegateScheduler
        super().__init__(config, pages, kind, in_flight=2 if ahead else 1, on_device=on_device)
        self.witness = Witness(pages)
        self.fault: Callable[[Tables], set[str]] | None = None
        """Let loose on the tables of the next step; returns whom it befell, none if there was nobody."""
        self.landed = 0
        self.given_again: set[int] = set()
        """Pages that the pool gave out while somebody had them."""
        self._given: Tables
        self._spoilt: set[str] = set()
        self._computing_wrongly: set[str] = set()
        self._taken_out: list[_Row] = []
        self._requests: list[Any] = []
        self.mischief = _let_loose
        self._before_step, self.guard.before_step = self.guard.before_step, self._watched_before_step

    def begin_anew(self) -> None:
        """As if it had just been made: what comes does not depend on what was before."""
        self.balanced()
        assert self.scheduler.reset_prefix_cache()
        queue = self.pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        queue.append_n(sorted(blocks, key=lambda block: int(block.block_id)))
        self.witness = Witness(self.pool.num_gpu_blocks)
        self.answers, self.texts, self._requests = {}, {}, []
        self.steps = 0

    def add(self, name: str, prompt: list[int], **how: Any) -> None:
        super().add(name, prompt, **how)
        self._requests.append(self.scheduler.requests[name])

    @property
    def flying(self) -> int:
        return len(self._flying)

    def fly(self) -> None:
        step = self.scheduler.schedule()
        self._flying.append((step, self._compute(step)))
        self.steps += 1

    def land(self) -> None:
        self._take_in()
        if not self._flying:
            self._hashes_hold()

    def computes_wrongly(self, name: str, fault: PageFault) -> None:
        """Found before the forward, in which the request makes something of whatever lies in its page."""
        self.check.fault(name, fault)
        self._computing_wrongly.add(name)

    # -- inside

    def _watched_before_step(self, scheduler: Any, output: Any) -> Any:
        scheduled = set(output.num_scheduled_tokens)
        new = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed = new | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        given = {r: list(scheduler.kv_cache_manager.get_block_ids(r)[0]) for r in scheduled}
        shared: dict[int, set[str]] = {}
        for name in scheduler.requests:
            for page in scheduler.kv_cache_manager.get_block_ids(name)[0]:
                shared.setdefault(page, set()).add(name)
        for page in self.given_again:
            self.witness.misled |= shared.get(page, set())
        self.given_again.clear()
        ledger = self.guard.ledger
        assert isinstance(ledger, GenerationLedger)
        for page in range(self.pool.num_gpu_blocks):
            if ledger.is_fresh(page):
                self.witness.forget(page)
        orders = self._before_step(scheduler, output)
        self._taken_out = [
            self._row(name, computed[name], given[name], [], [])
            for name in sorted(scheduled - output.num_scheduled_tokens.keys())
        ]
        return orders

    def _row(self, name: str, computed: int, given: list[int], read: list[int], slots: list[int]) -> _Row:
        keys = keys_of(self.texts[name][: computed + len(slots)])
        return _Row(name, keys, computed, given, read, slots, len(keys))

    def loose(self, tables: Tables) -> None:
        """The fault that waits, and a copy of the tables as they are then."""
        if self.fault is not None and (befallen := self.fault(tables)):
            self._spoilt, self.fault = befallen, None
            self.landed += 1
        self._given = Tables(
            tables.block_table.copy(), tables.seq_lens, tables.query_start_loc, tables.slot_mapping
        )

    def _forward(self, tables: Tables, plan: dict[str, tuple[int, int]]) -> dict[str, list[int]]:
        slots: Iterator[int] = iter(tables.slot_mapping.tolist())
        rows = []
        for row, (name, (computed, count)) in enumerate(plan.items()):
            given, read = self._given.block_table[row].tolist(), tables.block_table[row].tolist()
            rows.append(self._row(name, computed, given, read, [next(slots) for _ in range(count)]))
        for row in rows:
            if row.name in self._computing_wrongly:
                row.wrong_from = row.computed
        spoilt, self._spoilt = self._spoilt, set()
        self.witness.forward(rows, self._taken_out, spoilt | self._computing_wrongly)
        self._taken_out, self._computing_wrongly = [], set()
        tokens: dict[str, list[int]] = {}
        for row in rows:
            end = len(row.keys)
            tokens[row.name] = []
            if not self.scheduler.requests[row.name].is_prefill_chunk:
                text = self.texts[row.name]
                right = row.wrong_from == end
                token = digest(np.array(text[:end], np.int64)) if right else WRONG_TOKEN
                text[end:] = [token]
                tokens[row.name] = [token]
        return tokens

    def _hashes_hold(self) -> None:
        """With nothing under way: each hash leads to pages that hold what was hashed."""
        known: dict[bytes, list[int]] = {}
        for request in self._requests:
            keys = keys_of(request.all_token_ids)
            for index, page_hash in enumerate(request.block_hashes):
                known[page_hash] = keys[index * BLOCK : (index + 1) * BLOCK]
        for key, found in self.pool.cached_block_hash_to_block._cache.items():
            for page in found if isinstance(found, dict) else [found.block_id]:
                right = self.witness.holds_text(page, known[get_block_hash(key)])
                assert right, f"the hash of page {page} promises another text"


def _let_loose(engine: ToyEngine, step: Any, tables: Tables) -> None:
    assert isinstance(engine, WitnessedEngine)
    engine.loose(tables)
