"""Seeded prompts that no cache has seen."""

from random import Random
from typing import Final

TEMPLATE_TOKENS: Final = 27
"""About what the chat template, the unique mark and the instruction add."""

_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community"
)
_WORDS: Final = _TEXT.split()


def messages(rng: Random, tokens: int) -> list[dict[str, str]]:
    """A chat of about `tokens` prompt tokens: how many they really are, the server says.

    The first message begins with random digits, so that not even the first page is in a prefix cache. The
    instruction invites a long answer, so that it ends at its limit.
    """
    mark = f"{rng.getrandbits(40)}"
    words = " ".join(rng.choices(_WORDS, k=max(1, tokens - TEMPLATE_TOKENS)))
    return [
        {"role": "system", "content": mark},
        {"role": "user", "content": f"Write a long story: {words}"},
    ]
