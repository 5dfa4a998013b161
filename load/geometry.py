"""What a model is made of, in the words of its `config.json`: its parameters, and what a token keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

from pydantic import TypeAdapter, ValidationError

Elements = Literal["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2"]

BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Of one element of the cache."""

TILE: Final = 128
"""Elements that share one float32 scale in the two caches of a sparse model: `quant_block_size` of
`Indexer` (vllm/model_executor/models/deepseek_v2.py), and the layout `fp8_ds_mla`
(vllm/v1/attention/backends/mla/flashmla_sparse.py)."""
SCALE_BYTES: Final = 4


class GeometryError(ValueError):
    """The profile's `geometry` describes no model. One line per mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Of sparse attention: a small attention of its own chooses the tokens that the large one reads."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_topk_freq: int = 1
    index_skip_topk_offset: int = 2

    def layers(self, of: int) -> int:
        """Layers that choose for themselves; the others reuse a choice and have neither weights nor cache.

        The rule is that of `DeepseekV2MLAAttention` (vllm/model_executor/models/deepseek_v2.py).
        """
        return sum(
            max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0 for layer in range(of)
        )

    @property
    def bytes_per_token(self) -> int:
        """In one layer: keys in FP8 with a scale for each tile, whatever the format of the large cache."""
        return self.index_head_dim + self.index_head_dim // TILE * SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    """The first layers, which are dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Parameters that are kept, shared out and read in the same way."""

    name: str
    parameters: int
    kind: Literal["expert", "linear", "other"]
    """Routed experts; matrices that are multiplied with; what no checkpoint quantises."""
    replicated: bool = False
    """Whole on every GPU of an engine, not divided among them."""
    read: bool = True
    """Wholly in each step; an embedding is looked up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    __pydantic_config__: ClassVar = {"extra": "forbid"}

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    gqa: Gqa | None = None
    mla: Mla | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if (self.gqa is None) == (self.mla is None):
            raise ValueError("give exactly one of `gqa` and `mla`")
        if self.indexer is not None and self.mla is None:
            raise ValueError("`indexer` goes with `mla`")

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts())

    def parts(self) -> Iterator[Part]:
        """Without layers for speculative decoding, which is not used, and without a vision tower."""
        vocabulary = self.vocab_size * self.hidden_size
        yield Part(name="embedding", parameters=vocabulary, kind="other", read=self.tie_word_embeddings)
        if not self.tie_word_embeddings:
            yield Part(name="head", parameters=vocabulary, kind="other")
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        yield Part(name="norms", parameters=norms, kind="other", replicated=True)
        if self.gqa is not None:
            yield self._gqa(self.gqa)
        if self.mla is not None:
            yield from self._mla(self.mla)
        yield from self._feed_forward()

    def _gqa(self, gqa: Gqa) -> Part:
        heads = 2 * gqa.num_attention_heads + 2 * gqa.num_key_value_heads
        size = self.num_hidden_layers * self.hidden_size * heads * gqa.head_dim
        return Part(name="attention", parameters=size, kind="linear")

    def _mla(self, mla: Mla) -> Iterator[Part]:
        latent = mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim
        wide = mla.q_lora_rank * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        wide += mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        wide += self.hidden_size * mla.v_head_dim
        layers = self.num_hidden_layers
        # `fused_qkv_a_proj` and the indexer are whole on every rank (`disable_tp`, `ReplicatedLinear`).
        yield Part(
            name="latents", parameters=layers * self.hidden_size * latent, kind="linear", replicated=True
        )
        yield Part(name="attention", parameters=layers * wide * mla.num_attention_heads, kind="linear")
        if (indexer := self.indexer) is not None:
            full, head = indexer.layers(layers), indexer.index_head_dim
            queries = full * mla.q_lora_rank * indexer.index_n_heads * head
            keys = full * self.hidden_size * (head + indexer.index_n_heads)
            yield Part(name="index queries", parameters=queries, kind="linear", replicated=True)
            yield Part(name="index keys", parameters=keys, kind="other", replicated=True)

    def _feed_forward(self) -> Iterator[Part]:
        experts = self.experts
        dense = self.num_hidden_layers if experts is None else experts.first_k_dense_replace
        size = dense * 3 * self.hidden_size * self.intermediate_size
        yield Part(name="dense feed-forward", parameters=size, kind="linear")
        if experts is None:
            return
        layers = self.num_hidden_layers - dense
        one = 3 * self.hidden_size * experts.moe_intermediate_size
        router = layers * self.hidden_size * experts.n_routed_experts
        yield Part(name="router", parameters=router, kind="other", replicated=True)
        yield Part(name="shared experts", parameters=layers * experts.n_shared_experts * one, kind="linear")
        yield Part(name="routed experts", parameters=layers * experts.n_routed_experts * one, kind="expert")

    def bytes_per_token(self, kv_format: str, ranks: int = 1) -> int:
        """Of the cache, on each of an engine's GPUs, over all layers."""
        return self.num_hidden_layers * self.layer_bytes(kv_format, ranks) + self.indexer_bytes()

    def layer_bytes(self, kv_format: str, ranks: int) -> int:
        """Of a token in one layer of the large cache, on one GPU.

        Heads are divided among the GPUs, at least one each. The latent of MLA has no heads: each GPU keeps
        all of it. Where attention is sparse, vLLM keeps a cache in FP8 on Hopper as `fp8_ds_mla`: the latent
        in FP8 with a scale for each tile, the rotary part in BF16.
        """
        size = BYTES[kv_format]
        if self.gqa is not None:
            return 2 * max(1, self.gqa.num_key_value_heads // ranks) * self.gqa.head_dim * size
        assert self.mla is not None
        latent, rotary = self.mla.kv_lora_rank, self.mla.qk_rope_head_dim
        if self.indexer is not None and size == 1:
            return latent + latent // TILE * SCALE_BYTES + 2 * rotary
        return (latent + rotary) * size

    def indexer_bytes(self) -> int:
        """Of a token's keys in the cache of the indexer, over all its layers."""
        if self.indexer is None:
            return 0
        return self.indexer.layers(self.num_hidden_layers) * self.indexer.bytes_per_token

    def bytes_read(self, kv_format: str, ranks: int, context: int) -> int:
        """Of the cache, on each GPU, to decode one token after `context` others."""
        if self.indexer is None:
            return self.bytes_per_token(kv_format, ranks) * context
        chosen = min(context, self.indexer.index_topk)
        large = self.num_hidden_layers * self.layer_bytes(kv_format, ranks) * chosen
        return large + self.indexer_bytes() * context


_adapter: Final = TypeAdapter(Geometry)


def parse_geometry(raw: Any, *, source: str) -> Geometry:
    """
    Raises:
        GeometryError: naming each wrong key.
    """
    try:
        return _adapter.validate_python(raw)
    except ValidationError as bad:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'geometry'}: {e['msg']}" for e in bad.errors()]
        raise GeometryError(f"{source}: geometry:\n  " + "\n  ".join(lines)) from None
