"""The worker's half where the model works behind the host: what is checked lies, and stays, on the device.

A step's check is queued on the device's stream between the kernels that write the tables and those that read
them. It masks what is wrong by itself. What it found travels to the host behind it, and is read with the
step's tokens, which come after it: nothing waits. The host sends what changed in the shadow, and three
numbers a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kv_transfer.integrity.checker import CheckCounts, Roll
from kv_transfer.integrity.delta import LedgerDelta
from kv_transfer.integrity.shadow import Bools, GroupRows, GroupShape, Int32s, Int64s, Shadow
from kv_transfer.integrity.verify import Batch, Finding, RowTensors, Tables, judge_torch

Judge = Callable[..., torch.Tensor]
"""`judge_torch`, or `verify_triton.check_triton`."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was found in one row first; see `verify`."""

    group: int
    finding: Finding
    where: int
    page: int


class Verdict:
    """Of one step. Read it once the step's tokens have been read; earlier, it waits for the device."""

    def __init__(self, request_ids: Sequence[str], findings: Sequence[tuple[int, torch.Tensor]]) -> None:
        """
        Args:
            findings: (cache group, findings on the device); copied to the host behind what is queued by now.
        """
        self._request_ids = tuple(request_ids)
        self._arrived: torch.cuda.Event | None = None
        self._findings = [(group, _to_host(found)) for group, found in findings]
        if any(found.is_cuda for _, found in findings):
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> dict[str, Sighting]:
        """The requests that must end."""
        if self._arrived is not None:
            self._arrived.synchronize()
        seen: dict[str, Sighting] = {}
        for group, findings in self._findings:
            rows = findings.numpy()
            for row in np.flatnonzero(rows[:, 0]).tolist():
                code, where, page = rows[row].tolist()
                seen.setdefault(self._request_ids[row], Sighting(group, Finding(code), where, page))
        return seen

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Crosses processes as what it says: vLLM sends a step's news together with its tokens."""
        return Seen, (self.read(),)


@dataclass(frozen=True, slots=True)
class Seen:
    """A verdict that was read: by another process, or of several ranks together."""

    sightings: Mapping[str, Sighting]

    def read(self) -> Mapping[str, Sighting]:
        return self.sightings


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Of the steps that are under way, the one that was queued last among them."""

    steps: tuple[Verdict | Seen, ...] = ()

    def read(self) -> Mapping[str, Sighting]:
        seen: dict[str, Sighting] = {}
        for step in self.steps:
            seen |= step.read()
        return seen


NO_VERDICTS: Final = Verdicts()
NOTHING_SEEN: Final = Seen({})


class _Mirror:
    """One group's rows of the shadow on the device, brought up to date with what was written to since."""

    def __init__(self, rows: GroupRows, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self.tags, self.pages, self.own = self._copies()

    def _copies(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._rows.edits = []
        tags, pages, own = (_to_device(part, self._device) for part in self._parts())
        return tags, pages, own

    def _parts(self) -> tuple[Int64s, Int32s, Bools]:
        return self._rows.tags, self._rows.pages, self._rows.own

    def update(self) -> None:
        width = self._rows.pages.shape[1]
        if self._rows.pages.shape != tuple(self.pages.shape):
            self.tags, self.pages, self.own = self._copies()
        elif edits := self._rows.edits:
            self._rows.edits = []
            spans = [np.arange(slot * width + start, slot * width + end) for slot, start, end in edits]
            # Each once: a device writes twice to one place in any order.
            at = np.unique(np.concatenate(spans))
            where = _to_device(at, self._device)
            kept: tuple[torch.Tensor, ...] = (self.tags, self.pages, self.own)
            parts: tuple[npt.NDArray[Any], ...] = self._parts()
            for tensor, part in zip(kept, parts, strict=True):
                tensor.view(-1).index_copy_(0, where, _to_device(part.reshape(-1)[at], self._device))


class DeviceChecker:
    """As `checker.Checker`, for a device that is not waited for."""

    def __init__(
        self,
        pages: int,
        groups: Sequence[GroupShape],
        device: torch.device,
        *,
        now: Callable[[], float],
        judge: Judge = judge_torch,
    ) -> None:
        self.shadow = Shadow(pages, groups)
        self.counts = CheckCounts()
        self._device, self._now, self._judge = device, now, judge
        self._page_tags = _to_device(self.shadow.tags, device)
        self._mirrors = [_Mirror(rows, device) for rows in self.shadow.rows]
        self._poison = torch.zeros(self.shadow.room, dtype=torch.uint8, device=device)
        self._roll = Roll(self.shadow)

    def apply(self, delta: LedgerDelta) -> None:
        """Queues the copying of what changed, behind the steps that are under way."""
        began = self._now()
        vacated = [self.shadow.slot(request_id) for request_id in delta.dropped]
        self.shadow.apply(delta)
        if delta.tags:
            pages, tags = (np.array(list(part), np.int64) for part in (delta.tags, delta.tags.values()))
            self._page_tags.index_copy_(0, self._send(pages), self._send(tags))
        for mirror in self._mirrors:
            mirror.update()
        if vacated:  # whoever gets the slot next is not poisoned
            self._poison.index_fill_(0, self._send(np.array(vacated, np.int64)), 0)
        if len(self._poison) < self.shadow.room:
            self._poison = torch.nn.functional.pad(self._poison, (0, self.shadow.room - len(self._poison)))
        self.counts.seconds += self._now() - began

    def check(
        self,
        groups: Sequence[tuple[int, Tables]],
        request_ids: Sequence[str],
        plan: Mapping[str, tuple[int, int]],
    ) -> Verdict:
        """Queue the check of one step, and the masks for what is wrong with it, in all groups."""
        began = self._now()
        ordered = self._roll.call(request_ids, plan)
        slots, computed, starts = map(self._send, (ordered.slots, ordered.computed, ordered.starts))
        batch = Batch(slots, computed, starts, ordered.tokens)
        if len(groups) == 1:
            findings = self._look(groups, batch, contain=True)
        else:
            # Who is flagged in one group is poisoned, and masked in all of them.
            findings = self._look(groups, batch, contain=False) + self._look(groups, batch, contain=True)
        self.counts.steps += 1
        self.counts.pages += _pages_read(ordered, self.shadow.shapes)
        self.counts.seconds += self._now() - began
        return Verdict(request_ids, findings)

    def _look(
        self, groups: Sequence[tuple[int, Tables]], batch: Batch, *, contain: bool
    ) -> list[tuple[int, torch.Tensor]]:
        findings = []
        for group, tables in groups:
            mirror, shape = self._mirrors[group], self.shadow.shapes[group]
            rows = RowTensors(self._page_tags, mirror.tags, mirror.pages, mirror.own, self._poison)
            findings.append((group, self._judge(tables, batch, rows, shape, contain=contain)))
        return findings

    def _send(self, array: Any) -> torch.Tensor:
        return _to_device(array, self._device)


def _pages_read(batch: Batch, shapes: Sequence[GroupShape]) -> int:
    """Of the step; arrays."""
    ends = batch.computed + np.diff(batch.starts)
    total = 0
    for shape in shapes:
        total += int((-(-ends // shape.block_size)).sum())
        if shape.window is not None:
            total -= int((np.maximum(0, batch.computed - shape.window + 1) // shape.block_size).sum())
    return total


def _to_device(array: Any, device: torch.device) -> torch.Tensor:
    """A copy that is queued; the array may change at once."""
    copied = torch.from_numpy(np.array(array))
    if device.type != "cuda":
        return copied.to(device)
    return copied.pin_memory().to(device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is queued: whole once the device has come so far."""
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
