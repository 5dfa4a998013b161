"""The contract of a model folder: see `kv_transfer.api.Contract`. Pure but for `contract_of`, which reads.

Facts are chosen so that a copy in another weight format keeps them, also one that another version of
`transformers` has written: names of old and new forms are one, defaults are filled in, and what says only how
a file was written is left out.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from kv_transfer.api import Contract
from workers.api import Phase
from workers.profile.model_folder import ModelFolder, read_folder
from workers.profile.scales import scale_file_sha256
from workers.profile.schema import ModelProfile

_LONGEST_FACT: Final = 100
_ARCHITECTURE: Final = (
    *("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "vocab_size", "hidden_act", "rms_norm_eps", "attn_logit_softcapping"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
)
_LATENT: Final = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim")
"""Of models that cache one latent vector a token instead of heads."""
_ROPE_NAMES: Final = {
    "rope_theta": "theta",
    "rope_type": "type",
    "max_position_embeddings": "positions",
    "rope_local_base_freq": "local_theta",
}
_ROPE_LOOSE: Final = (
    "rope_theta",
    "max_position_embeddings",
    "rope_local_base_freq",
    "partial_rotary_factor",
)
"""Said beside `rope_scaling` in the old form, in `rope_parameters` in the new one."""
_STATE_OF_TOKENIZERS: Final = ("version", "truncation", "padding")
_SPECIAL: Final = ("bos_token", "eos_token", "add_bos_token", "add_eos_token")
_canonical = msgspec.json.Encoder(order="sorted").encode


def contract_of(profile: ModelProfile, folder: Path) -> Contract:
    """The contract of an engine that loads this folder for this profile.

    Raises:
        ModelFolderError
        ScaleFileError: decode's scale file cannot be used.
    """
    return contract_from(
        read_folder(folder),
        source_revision=profile.source_revision,
        scales_sha256=scale_file_sha256(profile.densest, Phase.DECODE),
    )


def contract_from(
    folder: ModelFolder, *, source_revision: str | None = None, scales_sha256: str = ""
) -> Contract:
    """
    Args:
        source_revision: as the profile says it; what the folder itself has recorded goes before it.
        scales_sha256: of the file with the scales of decode's cache, in hex; empty: there is none.
    """
    config = {**folder.config, **(folder.config.get("text_config") or {})}
    return Contract(
        architecture=_facts((name, config.get(name)) for name in _ARCHITECTURE),
        kv_geometry=_facts(_kv_geometry(config)),
        rope=_facts(_rope(config)),
        tokenizer=_facts(_tokenizer(folder)),
        chat_template=_facts(_chat_template(folder.chat_template)),
        source=_facts([("revision", _revision(folder.record) or source_revision)]),
        scale_file=_facts([("sha256", scales_sha256 or None)]),
    )


def _kv_geometry(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    usual = width // heads if isinstance(heads, int) and isinstance(width, int) and heads else None
    yield "layers", config.get("num_hidden_layers")
    yield "heads", config.get("num_key_value_heads") or heads
    yield "head_dim", config.get("head_dim") or usual
    if config.get("use_sliding_window", True):
        yield "window", config.get("sliding_window")
    for name in _LATENT:
        yield name, config.get(name)


def _rope(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    told = {name: config[name] for name in _ROPE_LOOSE if name in config}
    told |= {"rope_type": "default"}
    for form in ("rope_scaling", "rope_parameters"):
        for name, value in (config.get(form) or {}).items():
            told["rope_type" if name == "type" else name] = value
    for name, value in told.items():
        if isinstance(value, Mapping):  # of one kind of layer
            yield from ((f"{name}.{_ROPE_NAMES.get(key, key)}", each) for key, each in value.items())
        else:
            yield _ROPE_NAMES.get(name, name), value


def _tokenizer(folder: ModelFolder) -> Iterator[tuple[str, Any]]:
    if folder.tokenizer:
        told = {name: part for name, part in folder.tokenizer.items() if name not in _STATE_OF_TOKENIZERS}
        model = dict(told.get("model") or {})
        model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or ()]
        yield "tokens", len(model.get("vocab") or ())
        yield "sha256", _sha256(_canonical(told | {"model": model}))
    for name, data in folder.other_tokenizers.items():
        yield name, _sha256(data)
    for name in _SPECIAL:
        value = folder.tokenizer_config.get(name)
        yield name, value.get("content") if isinstance(value, Mapping) else value


def _chat_template(template: str) -> Iterator[tuple[str, Any]]:
    if template:
        yield "characters", len(template)
        yield "sha256", _sha256(template.encode())


def _revision(record: Mapping[str, Any]) -> str | None:
    found = record.get("source_revision") or record.get("source_sha256")
    return None if found is None else str(found)


def _facts(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    return {name: _fact(value) for name, value in named if value is not None}


def _fact(value: Any) -> str:
    """In few words: files spell one number in many ways."""
    if isinstance(value, str):
        word = value
    elif isinstance(value, float):
        word = str(int(value)) if value.is_integer() else f"{value:.6g}"
    else:
        word = _canonical(value).decode()
    return word if len(word) <= _LONGEST_FACT else f"sha256 {_sha256(word.encode())}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
