"""Which requests go where, in which order: pure and seeded."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Conditions under which both servers are measured."""

    prompt_tokens: int
    """As aimed at."""
    concurrency: int


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts, to one server after the other."""

    cell: Cell
    order: tuple[str, ...]
    prompt_seed: int


def rounds(cells: list[Cell], arms: tuple[str, ...], repeats: int, rng: Random) -> list[list[Pair]]:
    """Each round has every cell once, in random order, and each pair its arms in random order.

    What changes slowly on the machine meets all cells and all arms alike, and whoever stops after a whole
    round has as many pairs in each cell.
    """
    plan = []
    for _ in range(repeats):
        pairs = [
            Pair(
                cell=cell,
                order=tuple(rng.sample(arms, len(arms))),
                prompt_seed=rng.getrandbits(48),
            )
            for cell in cells
        ]
        rng.shuffle(pairs)
        plan.append(pairs)
    return plan
