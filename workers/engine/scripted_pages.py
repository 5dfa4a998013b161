"""Cache pages of the scripted engine: vLLM's own block pool, with prefix hits and cache salts.

The pages hold no keys and values. Everything else about them is real: allocation, sharing, eviction.
"""

from typing import Any, Final

_GROUP: Final = 0


class Pages:
    """A pool of pages, handed out to requests."""

    def __init__(self, total: int, block_size: int) -> None:
        """Imports vLLM, which takes seconds."""
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256_cbor)
        self._pool = BlockPool(
            total + 1, enable_caching=True, hash_block_size=block_size
        )  # one is the null page
        self._hasher = get_request_block_hasher(block_size, sha256_cbor)
        self._block_size = block_size
        self.total = total

    @property
    def free(self) -> int:
        """Pages that no request uses; cached ones among them."""
        return int(self._pool.get_num_free_blocks())

    def holder(self, request_id: str, token_ids: tuple[int, ...], cache_salt: str) -> "Holder":
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request(
            request_id,
            list(token_ids),
            SamplingParams(max_tokens=1),
            None,
            cache_salt=cache_salt,
            block_hasher=self._hasher,
        )
        return Holder(self._pool, request, self._block_size)


class Holder:
    """The tokens of one request, and the pages it holds for them."""

    def __init__(self, pool: Any, request: Any, block_size: int) -> None:
        self._pool = pool
        self._request = request
        self._block_size = block_size
        self._blocks: list[Any] = []
        self._hashed = 0
        """Leading pages that the prefix cache knows."""
        self._fresh: list[int] = []
        """Tokens that vLLM's request does not know yet: it hashes whole pages only."""
        self.tokens = int(request.num_tokens)
        """Prompt and answer so far."""

    def append(self, token_id: int) -> None:
        self.tokens += 1
        self._fresh.append(token_id)
        if self.tokens % self._block_size == 0:
            self._request.append_output_token_ids(self._fresh)
            self._fresh = []

    def take_cached(self) -> int:
        """Hold the pages that the prefix cache has; returns the tokens in them, always less than all."""
        hits: list[Any] = []
        for block_hash in self._request.block_hashes[: (self.tokens - 1) // self._block_size]:
            found = self._pool.get_cached_block(block_hash, [_GROUP])
            if found is None:
                break
            hits += found
        self._pool.touch(hits)
        self._blocks, self._hashed = hits, len(hits)
        return len(hits) * self._block_size

    def grow(self, tokens: int) -> bool:
        """Hold pages for the first `tokens`. False, and nothing changes, when the pool has too few."""
        missing = -(-tokens // self._block_size) - len(self._blocks)
        if missing > self._pool.get_num_free_blocks():
            return False
        if missing > 0:
            self._blocks += self._pool.get_new_blocks(missing)
        return True

    def publish(self, computed: int) -> None:
        """The first `computed` tokens are in their pages: full pages can be found by others from now on."""
        full = computed // self._block_size
        if full > self._hashed:
            self._pool.cache_full_blocks(
                self._request, self._blocks, self._hashed, full, self._block_size, _GROUP
            )
            self._hashed = full

    def release(self) -> None:
        """Give the pages back, the last one first: a prefix outlives what follows it."""
        self._pool.free_blocks(reversed(self._blocks))
        self._blocks, self._hashed = [], 0
