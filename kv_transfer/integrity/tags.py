"""Tags: what a page is called from one change of hands to the next.

63 bits, so that a tag fits a signed word: `generation (43) | domain (20)`. The generation alone makes a tag
unique within one engine; at a million changes a second it lasts 101 days. The domain tells tenants apart in a
report. It is too short to isolate anybody: the salt inside the block hash does that.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import Final

GENERATION_BITS: Final = 43
DOMAIN_BITS: Final = 20
NO_TAG: Final = 0
NO_DOMAIN: Final = 0
"""Of whoever has no salt, and of pages that nobody has used yet."""

_DOMAINS: Final = 1 << DOMAIN_BITS
_LAST_GENERATION: Final = (1 << GENERATION_BITS) - 1


class TagsExhausted(RuntimeError):
    """The counter would wrap, and tags would repeat: the engine has to be restarted."""


@lru_cache(maxsize=1024)
def domain_of(salt: str) -> int:
    """Domain of a tenant's cache salt; `NO_DOMAIN` for the empty one."""
    if not salt:
        return NO_DOMAIN
    digest = blake2b(salt.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest) % (_DOMAINS - 1)


def tag_domain(tag: int) -> int:
    return tag % _DOMAINS


def tag_generation(tag: int) -> int:
    return tag >> DOMAIN_BITS


class TagSource:
    """The one counter of an engine."""

    def __init__(self, last_generation: int = 0) -> None:
        self._generation = last_generation

    def next(self, domain: int) -> int:
        """A tag that was never given before.

        Raises:
            TagsExhausted: the counter is at its end.
        """
        if self._generation >= _LAST_GENERATION:
            raise TagsExhausted(f"{self._generation} changes of pages since the engine's start")
        self._generation += 1
        return self._generation << DOMAIN_BITS | domain
