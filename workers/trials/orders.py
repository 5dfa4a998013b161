"""What a trial is told, and what it answers: a line of JSON each way."""

from typing import Any

import msgspec

Ids = tuple[int, ...]


class Start(msgspec.Struct, frozen=True):
    profile: dict[str, Any]
    """As in a profile's file."""
    model: str
    """Folder."""
    pair: bool
    """Prefill computes prompts and ships them; else the decode engine does all by itself."""
    pages: int | None = None
    """Of the decode engine's cache; None: as many as its memory holds."""


class Ready(msgspec.Struct, frozen=True):
    pages: int
    """That requests can use, of the engine that decodes."""
    block_size: int
    page_bytes: int


class Score(msgspec.Struct, frozen=True, tag=True):
    """Decode step by step along known continuations, and compare the probabilities of what could come."""

    prompts: tuple[Ids, ...]
    tokens: int
    """Of each continuation."""
    concurrency: int
    reference: str
    """File of log-probabilities, float32 [prompts, tokens, vocabulary]: see `forced.py`."""
    continuations: tuple[Ids, ...] = ()
    """Empty: this engine is the reference. It goes its own way, greedily, and writes the file."""


class Scored(msgspec.Struct, frozen=True):
    """By prompt; lists have a number for each token."""

    continuation: Ids
    dlogprob: tuple[float, ...]
    """Absolute differences of the log-probability of the continuation's token to the reference's."""
    kl: tuple[float, ...]
    """Of the reference's distribution to this one, in nats."""
    same_argmax: tuple[bool, ...]
    outcome: str | None
    """Of the hand-off; None: there was none."""


class Generate(msgspec.Struct, frozen=True, tag=True):
    """A closed loop of clients; prompts are computed before the clock starts, by prefill."""

    prompts: tuple[Ids, ...]
    tokens: int
    """Of each answer."""
    concurrency: int


class Generated(msgspec.Struct, frozen=True):
    seconds: float
    tokens: int
    preemptions: int
    most_running: int
    """Requests, of those seen at moments."""
    outcomes: dict[str, int]
    """Hand-offs, by outcome."""


class Skew(msgspec.Struct, frozen=True, tag=True):
    """On purpose: from now on decode reads its pages by so many times the key scales that it told prefill.

    Answered by the number of layers.
    """

    factor: float


Order = Score | Generate | Skew
