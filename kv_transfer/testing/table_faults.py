"""Faults in the tensors that the kernels are about to get: the worker's side, before anybody looks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kv_transfer.api.faults import PageFaultKind
from kv_transfer.integrity.verify import Tables

SOME_SLOT: Final = 3
"""Where in the other's page a stray token lands: it has been written by then, and will be read."""

IN_TABLES: Final = frozenset(
    {
        PageFaultKind.FLIP_LAST,
        PageFaultKind.FLIP_MIDDLE,
        PageFaultKind.FLIP_BEYOND,
        PageFaultKind.SHIFT_ROW,
        PageFaultKind.FOREIGN_SLOT,
    }
)


@dataclass(frozen=True, slots=True)
class TableFault:
    """Of one step; decided beside the scheduler."""

    kind: PageFaultKind
    victim: str
    """Request id."""
    instead: int
    """Page of the other request."""
    rank: int


class TableFaults:
    """Does nothing without orders."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._runner: Any = None

    def bind_runner(self, runner: Any) -> None:
        self._runner = runner

    def spoil(self, faults: Iterable[TableFault], groups: Iterable[tuple[int, Tables]]) -> None:
        """
        Args:
            groups: (cache group, its tables), as arrays that share the kernels' memory.
        """
        mine = [fault for fault in faults if fault.rank == self._rank]
        if not mine:
            return
        batch = self._runner.input_batch
        rows = batch.req_ids[: batch.num_reqs]
        done: set[tuple[TableFault, int]] = set()
        for group, tables in groups:
            size = batch.block_table.block_tables[group].block_size
            for fault in mine:
                array = (
                    tables.slot_mapping if fault.kind is PageFaultKind.FOREIGN_SLOT else tables.block_table
                )
                if fault.victim in rows and (fault, array.ctypes.data) not in done:
                    done.add((fault, array.ctypes.data))
                    _spoil(fault, rows.index(fault.victim), tables, size)


def _spoil(fault: TableFault, row: int, tables: Tables, size: int) -> None:
    if fault.kind is PageFaultKind.FOREIGN_SLOT:
        tables.slot_mapping[tables.query_start_loc[row]] = fault.instead * size + SOME_SLOT
        return
    used = -(-int(tables.seq_lens[row]) // size)
    tables.block_table[row] = spoil_pages(fault.kind, tables.block_table[row].tolist(), used, fault.instead)


def spoil_pages(kind: PageFaultKind, pages: Sequence[int], used: int, instead: int) -> list[int]:
    """A list of pages in logical order, gone wrong.

    Args:
        used: the leading ones that are read; there may be more.
        instead: another request's page.
    """
    wrong = list(pages)
    match kind:
        case PageFaultKind.SHIFT_ROW:
            wrong[: used - 1] = wrong[1:used]
        case PageFaultKind.FLIP_MIDDLE:
            wrong[used // 2] = instead
        case PageFaultKind.FLIP_BEYOND:
            wrong[used] = instead
        case _:
            wrong[used - 1] = instead
    return wrong
