"""Which fault, in which phase, is played on the real engine, and what it must come to. The table in
`docs/integrity.md` is made of this."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from kv_transfer.api.errors import TransferCause
from kv_transfer.api.faults import FaultPhase as Phase
from kv_transfer.api.faults import PageFaultKind as Kind
from kv_transfer.api.faults import PageFaultOrder
from kv_transfer.api.integrity import IntegrityCause as Cause
from tests.support.cell_words import Ask, Scene

TRANSFER: Final = "d" * 32


@dataclass(frozen=True, kw_only=True)
class Cell:
    kind: Kind
    phase: Phase
    asks: tuple[Ask, ...]
    victim: str = "a"
    other: str = "b"
    after_tokens: int = 0
    ends: dict[str, Cause] = field(default_factory=dict)
    """Requests that end as an error, by cause; all others answer as without the fault."""
    counted: dict[Cause, int] = field(default_factory=dict)
    handoff: str = ""
    """How the victim's pages came, where that is not as without the fault."""
    recomputed: bool = False
    """The victim answers right, from pages that were computed in other pieces: last bits may differ."""
    always_refused: bool = False
    """With integrity off, too: the transfer itself looks."""
    harmless: bool = False
    """Changes nothing, and is not to be seen."""

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.phase}"

    @property
    def calm(self) -> Scene:
        return Scene(asks=self.asks)

    @property
    def scene(self) -> Scene:
        order = PageFaultOrder(
            kind=self.kind,
            phase=self.phase,
            victim=self.victim,
            other=self.other,
            after_tokens=self.after_tokens,
        )
        return Scene(asks=self.asks, faults=(order,))

    def told(self) -> str:
        """In the document's table."""
        if self.harmless:
            return "ignored, changes nothing"
        causes = {*self.ends.values(), *self.counted}
        names = ", ".join(f"`{cause}`" for cause in sorted(causes))
        if self.ends:
            return f"{names}: {'both end' if len(self.ends) > 1 else 'ends'}"
        return f"{names or f'`{self.handoff}`'}: right answer"


def text(length: int, seed: int) -> tuple[int, ...]:
    rnd = random.Random(seed)
    return tuple(rnd.randrange(3, 1000) for _ in range(length))


def ask(name: str, length: int, tokens: int, *, at: int = 0, after: str = "") -> Ask:
    prompt = text(length, sum(name.encode()))
    return Ask(name=name, prompt=prompt, tokens=tokens, salt=name, at=at, after=after)


BESIDE: Final = (ask("b", 95, 14), ask("c", 70, 14))
"""Two that decode when the victim comes; `b` needs a new page in the third step."""
PREFILL: Final = (*BESIDE, ask("a", 75, 8, at=2), ask("l", 40, 6, at=4))
CHUNK: Final = (*BESIDE, ask("a", 400, 8, at=1), ask("l", 40, 6, at=4))
DECODE: Final = (ask("b", 107, 32), ask("c", 70, 32), ask("a", 75, 28))
RESUMED: Final = (
    *(ask("f", 330, 30), ask("b", 95, 40), ask("c", 70, 40), ask("a", 75, 60)),
    *(ask("e", 70, 8, after="f"), ask("g", 40, 4, after="e")),
)
"""Few pages: `a` loses its own to `b`, and gets others when `f` has ended."""
SHIPPED: Final = text(100, 77)


def shipped(*, asked_at: int, held_s: float = 20.0) -> tuple[Ask, ...]:
    """`p` computes a prompt in the third step and holds its pages; `d` fetches them. `b` needs a new page in
    the eighth step, `c` comes in the ninth."""
    return (
        ask("b", 90, 24),
        Ask(name="p", prompt=SHIPPED, tokens=1, salt="p", at=2, sends=TRANSFER, deadline_s=held_s),
        ask("c", 70, 20, at=8),
        Ask(name="d", prompt=SHIPPED, tokens=8, salt="d", at=asked_at, fetches=TRANSFER),
    )


SEND: Final = shipped(asked_at=14)
RECEIVE: Final = shipped(asked_at=7)
FORWARD: Final = (
    (Phase.PREFILL, PREFILL, 0),
    (Phase.CHUNK, CHUNK, 1),
    (Phase.DECODE, DECODE, 80),
    (Phase.RESUMED, RESUMED, 100),
)
"""Phase, scene, and tokens of the victim before the fault."""


def _forward_cells() -> Iterator[Cell]:
    for phase, asks, after in FORWARD:
        for kind, cause in (
            (Kind.FLIP_LAST, Cause.REALLOCATED),
            (Kind.FLIP_MIDDLE, Cause.REALLOCATED),
            (Kind.SHIFT_ROW, Cause.SHIFTED),
            (Kind.FOREIGN_SLOT, Cause.UNEXPECTED_WRITE),
            (Kind.FREE_LIVE, Cause.FREED),
        ):
            yield Cell(
                kind=kind, phase=phase, asks=asks, after_tokens=after, ends={"a": cause}, counted={cause: 1}
            )
        yield Cell(kind=Kind.FLIP_BEYOND, phase=phase, asks=asks, after_tokens=after, harmless=True)
        if phase is not Phase.PREFILL:
            for kind, cause in ((Kind.ZERO_TARGET, Cause.ZERO_TARGET), (Kind.COPY_SOURCE, Cause.COW_SOURCE)):
                yield Cell(kind=kind, phase=phase, asks=asks, after_tokens=after, counted={cause: 1})


def _look_up_cells() -> Iterator[Cell]:
    for kind, cause in (
        (Kind.STALE_PREFIX, Cause.STALE_PREFIX),
        (Kind.FOREIGN_DOMAIN, Cause.FOREIGN_DOMAIN),
    ):
        for phase, asks, victim in (
            (Phase.PREFILL, PREFILL, "a"),
            (Phase.CHUNK, CHUNK, "a"),
            (Phase.RESUMED, RESUMED, "a"),
            (Phase.SEND, SEND, "p"),
            (Phase.RECEIVE, RECEIVE, "d"),
        ):
            # After a preemption the victim would have found its own pages.
            recomputed = phase is Phase.RESUMED
            yield Cell(
                kind=kind,
                phase=phase,
                asks=asks,
                victim=victim,
                counted={cause: 1},
                recomputed=recomputed,
            )


def _double(
    kind: Kind, phase: Phase, asks: tuple[Ask, ...], ends: str, victim: str = "a", other: str = "b"
) -> Cell:
    return Cell(
        kind=kind,
        phase=phase,
        asks=asks,
        victim=victim,
        other=other,
        after_tokens=80 if phase is Phase.DECODE and kind is Kind.DOUBLE_ACROSS else 0,
        ends=dict.fromkeys(ends, Cause.DOUBLE_ASSIGNED),
        counted={Cause.DOUBLE_ASSIGNED: 2},
    )


def _double_cells() -> Iterator[Cell]:
    within, across = Kind.DOUBLE_IN_STEP, Kind.DOUBLE_ACROSS
    yield _double(within, Phase.PREFILL, PREFILL, "ab")
    yield _double(within, Phase.CHUNK, CHUNK, "ab")
    yield _double(within, Phase.DECODE, DECODE, "ab")
    yield _double(within, Phase.RESUMED, RESUMED, "ae", other="e")
    yield _double(within, Phase.RECEIVE, RECEIVE, "bd", victim="d")
    yield _double(across, Phase.CHUNK, CHUNK, "ab")
    yield _double(across, Phase.DECODE, DECODE, "ac", other="c")
    yield _double(across, Phase.RESUMED, RESUMED, "ag", other="g")
    yield _double(across, Phase.RECEIVE, shipped(asked_at=6), "bd", victim="d")
    # The other owner has ended already: only its pages are still there.
    yield _double(across, Phase.SEND, SEND, "b", victim="p")


def _transfer_cells() -> Iterator[Cell]:
    stale = TransferCause.STALE_TRANSFER

    def send(kind: Kind, counted: dict[Cause, int], handoff: str = "") -> Cell:
        return Cell(kind=kind, phase=Phase.SEND, asks=SEND, victim="p", counted=counted, handoff=handoff)

    def receive(kind: Kind, cause: Cause) -> Cell:
        return Cell(
            kind=kind,
            phase=Phase.RECEIVE,
            asks=RECEIVE,
            victim="d",
            ends={"d": cause},
            counted={cause: 1},
        )

    for kind in (Kind.FLIP_LAST, Kind.FLIP_MIDDLE, Kind.SHIFT_ROW):
        yield send(kind, {Cause.STALE_TRANSFER: 1}, stale)
        yield receive(kind, Cause.STALE_TRANSFER)
    for kind in (Kind.FREE_LIVE, Kind.STALE_TAG):
        yield send(kind, {Cause.FREED: 1, Cause.STALE_TRANSFER: 1}, stale)
        yield receive(kind, Cause.FREED)
    yield send(Kind.ZERO_TARGET, {Cause.ZERO_TARGET: 1})
    yield send(Kind.COPY_SOURCE, {Cause.COW_SOURCE: 1})
    yield Cell(
        kind=Kind.STALE_EPOCH,
        phase=Phase.SEND,
        asks=SEND,
        victim="p",
        handoff=TransferCause.FOREIGN_PEER,
        always_refused=True,
    )
    yield Cell(
        kind=Kind.STALE_EPOCH,
        phase=Phase.RECEIVE,
        asks=shipped(asked_at=7, held_s=4.0),
        victim="d",
        counted={Cause.STALE_TRANSFER: 1},
        handoff=stale,
        always_refused=True,
    )
    yield Cell(
        kind=Kind.CORRUPT_PAYLOAD,
        phase=Phase.RECEIVE,
        asks=RECEIVE,
        victim="d",
        counted={Cause.PAYLOAD_CHECKSUM: 1},
        handoff=TransferCause.CHECKSUM,
        always_refused=True,
    )


CELLS: Final = (*_forward_cells(), *_look_up_cells(), *_double_cells(), *_transfer_cells())
