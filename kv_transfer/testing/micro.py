"""The check alone, on decode steps that are right: what it costs by size and form."""

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from kv_transfer.integrity.checker import Checker
from kv_transfer.integrity.delta import LedgerDelta, RowGrowth
from kv_transfer.integrity.shadow import GroupShape
from kv_transfer.integrity.verify import Batch, RowTensors, Tables, check_torch

_REPEATS: Final = 100
_GROWING_ROWS: Final = 32
"""One row in so many gets a page in each step, as with pages of 32 tokens."""


def check_us(rows: int, pages: int, block_size: int) -> list[dict[str, Any]]:
    """Median microseconds of one check, for each form that runs here."""
    world = _World(rows, pages, block_size)
    found = [
        {"form": "numpy, as in use", "us": _median_us(world.step)},
        {"form": "numpy, no page new", "us": _median_us(world.check)},
        {"form": "torch gather, the reference", "us": _median_us(world.on("cpu"), _REPEATS // 5)},
    ]
    if torch.cuda.is_available():
        from kv_transfer.integrity.verify_triton import check_triton

        args = world.tensors("cuda")

        def kernel() -> None:
            check_triton(*args, contain=True)
            torch.cuda.synchronize()

        found.append({"form": "Triton kernel", "us": _median_us(kernel)})
        found.append({"form": "torch gather, the reference, on CUDA", "us": _median_us(world.on("cuda"))})
    return [{"rows": rows, "pages": pages, **row} for row in found]


class _World:
    """`rows` requests of so many pages each, all with their last page almost full."""

    def __init__(self, rows: int, pages: int, block_size: int) -> None:
        self._shape = GroupShape(block_size)
        self._checker = Checker(rows * pages + 1, [self._shape], now=time.perf_counter)
        self._names = [f"r{row}" for row in range(rows)]
        self._given = np.random.default_rng(1).permutation(rows * pages).reshape(rows, pages) + 1
        self._checker.apply(
            LedgerDelta(
                tags={page: 1000 + page for page in range(rows * pages + 1)},
                grown=[
                    RowGrowth(name, 0, 0, given.tolist(), (1000 + given).tolist(), [True] * pages)
                    for name, given in zip(self._names, self._given, strict=True)
                ],
            )
        )
        computed = pages * block_size - 2
        self._plan = dict.fromkeys(self._names, (computed, 1))
        table = np.zeros((rows, pages + 8), np.int32)  # what lies beyond is not compared
        table[:, :pages] = self._given
        slots = self._given[:, -1].astype(np.int64) * block_size + computed % block_size
        self._tables = Tables(
            table, np.full(rows, computed + 1, np.int32), np.arange(rows + 1, dtype=np.int32), slots
        )

    def check(self) -> None:
        if self._checker.check([(0, self._tables)], self._names, self._plan):
            raise AssertionError("a right step was flagged")

    def step(self) -> None:
        """With some rows whose last page is new, which is told with the step."""
        last = self._given.shape[1] - 1
        grown = [
            RowGrowth(name, 0, last, [page], [1000 + page], [True])
            for name, page in zip(self._names, self._given[:, -1].tolist(), strict=True)
        ][::_GROWING_ROWS]
        for growth in grown:
            self._checker.shadow.rows[0].clear(self._checker.shadow.slot(growth.request_id), last)
        self._checker.apply(LedgerDelta(grown=grown))
        self.check()

    def tensors(self, device: str) -> tuple[Tables, Batch, RowTensors, GroupShape]:
        def to(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        t, shadow = self._tables, self._checker.shadow
        rows, count = shadow.rows[0], len(self._names)
        computed = np.array([c for c, _ in self._plan.values()], np.int32)
        slots = np.array([shadow.slot(name) for name in self._names], np.int64)
        return (
            Tables(to(t.block_table), to(t.seq_lens), to(t.query_start_loc), to(t.slot_mapping)),
            Batch(to(slots), to(computed), to(np.arange(count + 1, dtype=np.int32)), count),
            RowTensors(
                to(shadow.tags),
                to(rows.tags),
                to(rows.pages),
                to(rows.own),
                to(np.zeros(len(rows.pages), np.uint8)),
            ),
            self._shape,
        )

    def on(self, device: str) -> Callable[[], None]:
        args = self.tensors(device)

        def check() -> None:
            if check_torch(*args).any():
                raise AssertionError("a right step was flagged")

        return check


def _median_us(act: Callable[[], None], repeats: int = _REPEATS) -> float:
    act()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return round(sorted(times)[repeats // 2] * 1e6, 1)
