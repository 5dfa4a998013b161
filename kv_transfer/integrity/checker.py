"""The worker's half: keeps the shadow, checks each step's tables, and says which requests must not go on.

A request that is flagged writes nothing in this step. The pages that it was to write are therefore revoked:
whoever reads them, found by their hash while the step was scheduled, is flagged with it, now or later.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import numpy as np

from kv_transfer.api.integrity import PageFault
from kv_transfer.integrity.causes import NOWHERE, explain
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.glance import Glance
from kv_transfer.integrity.shadow import STALE, Bools, GroupShape, Int32s, Int64s, Shadow
from kv_transfer.integrity.verify import Batch, Finding, Tables, check_numpy, contain, starts_of


@dataclass(slots=True)
class CheckCounts:
    """Since the engine's start."""

    steps: int = 0
    """That were checked."""
    unchecked: int = 0
    """That computed something and were not checked."""
    pages: int = 0
    """That were about to be read."""
    seconds: float = 0.0
    """Spent on applying changes and on checking."""


@dataclass(slots=True)
class _Judgement:
    """Of one step, as far as it has come."""

    request_ids: Sequence[str]
    flagged: Bools
    """[rows]"""
    faults: dict[str, PageFault] = field(default_factory=dict)


class Roll:
    """Puts what was ordered into the order of the tables' rows. What stays from step to step is kept."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._moves = -1
        self._request_ids: list[str] = []
        self._slots: Int64s = np.empty(0, np.int64)
        self._scheduled = b""
        self._starts: Int32s = np.zeros(1, np.int32)

    def call(self, request_ids: Sequence[str], plan: Mapping[str, tuple[int, int]]) -> Batch:
        if self._moves != self._shadow.moves or self._request_ids != request_ids:
            self._moves, self._request_ids = self._shadow.moves, list(request_ids)
            self._slots = np.array([self._shadow.slot(r) for r in request_ids], np.int64)
        ordered = chain.from_iterable(map(plan.get, request_ids, repeat((0, 0))))
        numbers = np.fromiter(ordered, np.int32, 2 * len(request_ids))
        computed, scheduled = numbers[::2], numbers[1::2]
        if scheduled.tobytes() != self._scheduled:
            self._scheduled = scheduled.tobytes()
            self._starts = starts_of(scheduled)
        return Batch(self._slots, computed, self._starts, int(self._starts[-1]))


class Checker:
    def __init__(self, pages: int, groups: Sequence[GroupShape], *, now: Callable[[], float]) -> None:
        """
        Args:
            pages: of the cache, the null page among them.
            now: seconds of a monotonic clock.
        """
        self.shadow = Shadow(pages, groups)
        self.counts = CheckCounts()
        self._roll = Roll(self.shadow)
        self._glances = [
            Glance(rows, shape) for rows, shape in zip(self.shadow.rows, self.shadow.shapes, strict=True)
        ]
        self._now = now

    def apply(self, delta: LedgerDelta) -> None:
        began = self._now()
        self.shadow.apply(delta)
        self.counts.seconds += self._now() - began

    def check(
        self,
        groups: Sequence[tuple[int, Tables]],
        request_ids: Sequence[str],
        plan: Mapping[str, tuple[int, int]],
        *,
        wrong: Collection[str] = (),
    ) -> dict[str, PageFault]:
        """Check one step and contain what is wrong with it: masked in place, in all groups.

        Args:
            groups: (cache group, its tables), as arrays that share the kernels' memory; a group may have
                several.
            request_ids: of the tables' rows; padding rows have none.
            plan: (tokens computed before, tokens scheduled), as the scheduler ordered.
            wrong: requests that something was found in before; they are taken for flagged.

        Returns:
            The requests that must end beside those, each with the first fault found in it.
        """
        began = self._now()
        faults: dict[str, PageFault] = {}
        if request_ids:
            batch = self._roll.call(request_ids, plan)
            for glance in self._glances:
                glance.look(batch)
                self.counts.pages += glance.pages
            known = np.array([request_id in wrong for request_id in request_ids]) if wrong else None
            for group, tables in groups:
                if known is not None or not self._glances[group].passes(tables):
                    faults = self._find(groups, batch, request_ids, known)
                    break
        self.counts.steps += 1
        self.counts.seconds += self._now() - began
        return faults

    def _find(
        self,
        groups: Sequence[tuple[int, Tables]],
        batch: Batch,
        request_ids: Sequence[str],
        known: Bools | None,
    ) -> dict[str, PageFault]:
        flagged = np.zeros(len(request_ids), np.bool_) if known is None else known
        judgement = _Judgement(request_ids, flagged)
        fresh = flagged | self._judge(groups, batch, judgement)
        while fresh.any():
            self._revoke_writes(batch, fresh)
            fresh = self._judge(groups, batch, judgement)
        if judgement.flagged.any():
            for _, tables in groups:
                contain(tables, batch, judgement.flagged)
        return judgement.faults

    def _judge(self, groups: Sequence[tuple[int, Tables]], batch: Batch, judgement: _Judgement) -> Bools:
        """Flag what is wrong now; returns the rows that were not flagged before."""
        before = judgement.flagged.copy()
        for group, tables in groups:
            findings = check_numpy(tables, batch, self.shadow.rows[group], self.shadow.shapes[group])
            wrong = (findings[:, 0] != Finding.NOTHING) & ~judgement.flagged
            for row in np.flatnonzero(wrong).tolist():
                judgement.flagged[row] = True
                fault = self._explain(group, int(batch.slots[row]), findings[row])
                judgement.faults[judgement.request_ids[row]] = fault
        return judgement.flagged & ~before

    def _explain(self, group: int, slot: int, finding: Int32s) -> PageFault:
        if slot < 0:
            return NOWHERE
        code, where, page = finding.tolist()
        rows, shape = self.shadow.rows[group], self.shadow.shapes[group]
        given, tags = rows.given[slot].tolist(), rows.tags[slot].tolist()
        return explain(Finding(code), where, page, given, tags, shape.block_size, self._tag_of)

    def _tag_of(self, page: int) -> int | None:
        return int(self.shadow.tags[page]) if 0 <= page < len(self.shadow.tags) else None

    def _revoke_writes(self, batch: Batch, flagged: Bools) -> None:
        ends = batch.computed + np.diff(batch.starts)
        for rows, shape in zip(self.shadow.rows, self.shadow.shapes, strict=True):
            for row in np.flatnonzero(flagged).tolist():
                slot = int(batch.slots[row])
                if slot >= 0:
                    touched = slice(
                        int(batch.computed[row]) // shape.block_size, -(-int(ends[row]) // shape.block_size)
                    )
                    # Not those that are another's by now, who writes them.
                    mine = rows.pages[slot, touched][rows.own[slot, touched]]
                    self.shadow.revoke(mine[mine != STALE].tolist())
