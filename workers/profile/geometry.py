"""What a model is made of, in the words of its `config.json`: validated here, used by `python -m load plan`.

Engines read the model's own `config.json`. This is for a plan that is made where the weights are not.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from annotated_types import Ge
from pydantic.types import Strict

_FORBID: Final = {"extra": "forbid"}
_Count = Annotated[int, Strict(), Ge(1)]
_Whole = Annotated[int, Strict(), Ge(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gqa:
    """Attention whose keys and values have heads, each for a group of queries."""

    __pydantic_config__: ClassVar = _FORBID

    num_attention_heads: _Count
    num_key_value_heads: _Count
    head_dim: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Attention that keeps one latent for all heads; every GPU of an engine keeps all of it."""

    __pydantic_config__: ClassVar = _FORBID

    num_attention_heads: _Count
    q_lora_rank: _Count
    kv_lora_rank: _Count
    qk_nope_head_dim: _Count
    qk_rope_head_dim: _Count
    v_head_dim: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """The small attention that chooses what sparse attention reads."""

    __pydantic_config__: ClassVar = _FORBID

    index_n_heads: _Count
    index_head_dim: _Count
    index_topk: _Count
    """Tokens that one token may read."""
    index_topk_freq: _Count = 1
    """One layer in so many chooses; those between reuse its choice."""
    index_skip_topk_offset: _Whole = 2
    """The first layers, which all choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward parts of which a token passes a few."""

    __pydantic_config__: ClassVar = _FORBID

    n_routed_experts: _Count
    num_experts_per_tok: _Count
    n_shared_experts: _Whole
    moe_intermediate_size: _Count
    first_k_dense_replace: _Whole
    """The first layers, which have no experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes as `config.json` names them. `load/geometry.py` computes with them."""

    __pydantic_config__: ClassVar = _FORBID

    num_hidden_layers: _Count
    hidden_size: _Count
    intermediate_size: _Count
    """Of dense feed-forward parts."""
    vocab_size: _Count
    tie_word_embeddings: Annotated[bool, Strict()] = False
    gqa: Gqa | None = None
    """Exactly one of `gqa` and `mla`."""
    mla: Mla | None = None
    indexer: Indexer | None = None
    """With `mla` alone: attention is sparse."""
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if (self.gqa is None) == (self.mla is None):
            raise ValueError("give exactly one of `gqa` and `mla`")
        if self.indexer is not None and self.mla is None:
            raise ValueError("`indexer` goes with `mla`")
        if self.experts is not None:
            if self.experts.num_experts_per_tok > self.experts.n_routed_experts:
                raise ValueError("experts.num_experts_per_tok is more than n_routed_experts")
            if self.experts.first_k_dense_replace > self.num_hidden_layers:
                raise ValueError("experts.first_k_dense_replace is more than num_hidden_layers")
