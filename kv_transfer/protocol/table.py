"""How the two tables are read."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
D = TypeVar("D", bound=Enum)


class IllegalTransition(RuntimeError):
    """The caller broke the protocol: a bug on our side, never a condition of the network."""


def step(table: Mapping[tuple[S, E], tuple[S, tuple[D, ...]]], state: S, event: E) -> tuple[S, tuple[D, ...]]:
    """Next state, and what the caller must now do, in order.

    Raises:
        IllegalTransition: the pair is not in the table. Nothing has changed.
    """
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} while {state.name}") from None
