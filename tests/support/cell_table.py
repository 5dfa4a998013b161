"""The table of page faults in `docs/integrity.md`: python -m tests.support.cell_table"""

import sys
from typing import Final

from kv_transfer.api.faults import FaultPhase as Phase
from kv_transfer.api.faults import PageFaultKind as Kind
from tests.support.page_cells import CELLS

COLUMNS: Final = {
    Phase.PREFILL: "prefill",
    Phase.CHUNK: "chunked prefill",
    Phase.DECODE: "decode",
    Phase.RESUMED: "after preemption",
    Phase.SEND: "transfer send",
    Phase.RECEIVE: "transfer receive",
}
ROWS: Final = {
    Kind.FLIP_LAST: "last entry flipped",
    Kind.FLIP_MIDDLE: "middle entry flipped",
    Kind.FLIP_BEYOND: "entry beyond the read range flipped",
    Kind.SHIFT_ROW: "row shifted by one",
    Kind.FOREIGN_SLOT: "write to a foreign slot",
    Kind.FREE_LIVE: "live page freed",
    Kind.DOUBLE_IN_STEP: "page given to two in one step",
    Kind.DOUBLE_ACROSS: "page given to another in a later step",
    Kind.STALE_PREFIX: "stale prefix hash",
    Kind.FOREIGN_DOMAIN: "another tenant's prefix hash",
    Kind.ZERO_TARGET: "wrong page cleared",
    Kind.COPY_SOURCE: "wrong page copied",
    Kind.STALE_EPOCH: "hand-off of an earlier engine start",
    Kind.STALE_TAG: "hand-off of pages that changed hands",
    Kind.CORRUPT_PAYLOAD: "payload corrupted",
}
_FORWARD: Final = (Phase.PREFILL, Phase.CHUNK, Phase.DECODE, Phase.RESUMED)
_TRANSFER: Final = (Phase.SEND, Phase.RECEIVE)
_WHY: Final = (
    "a transfer names only pages that it needs",
    "pages are shipped and taken in whole: a wrong one is a flipped entry",
    "pages are given out before they are computed: as in prefill",
    "all its pages are given out in the step that computes the prompt: as within one step",
    "no prefix is looked for",
    "the pages are new, and nothing is in them yet",
    "no hand-off",
    "its checksum is made of what leaves",
)
REASONS: Final[dict[tuple[Kind, Phase], int]] = {
    **dict.fromkeys(((Kind.FLIP_BEYOND, phase) for phase in _TRANSFER), 1),
    **dict.fromkeys(((Kind.FOREIGN_SLOT, phase) for phase in _TRANSFER), 2),
    (Kind.DOUBLE_IN_STEP, Phase.SEND): 3,
    (Kind.DOUBLE_ACROSS, Phase.PREFILL): 4,
    (Kind.STALE_PREFIX, Phase.DECODE): 5,
    (Kind.FOREIGN_DOMAIN, Phase.DECODE): 5,
    **dict.fromkeys(
        (
            (kind, phase)
            for kind in (Kind.ZERO_TARGET, Kind.COPY_SOURCE)
            for phase in (Phase.PREFILL, Phase.RECEIVE)
        ),
        6,
    ),
    **dict.fromkeys(
        (
            (kind, phase)
            for kind in (Kind.STALE_EPOCH, Kind.STALE_TAG, Kind.CORRUPT_PAYLOAD)
            for phase in _FORWARD
        ),
        7,
    ),
    (Kind.CORRUPT_PAYLOAD, Phase.SEND): 8,
}
"""Cells that cannot exist, and why: counted from 1."""


def table() -> str:
    """Markdown. Raises KeyError when a cell is neither played nor given a reason."""
    played = {(cell.kind, cell.phase): cell.told() for cell in CELLS}
    lines = [
        f"| fault | {' | '.join(COLUMNS.values())} |",
        f"|{'---|' * (1 + len(COLUMNS))}",
    ]
    for kind, name in ROWS.items():
        cells = [played.get((kind, phase)) or f"n/a ({REASONS[kind, phase]})" for phase in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"({number}) {why}" for number, why in enumerate(_WHY, 1)]
    return "\n".join([*lines, "", f"Not there: {'; '.join(reasons)}."])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
