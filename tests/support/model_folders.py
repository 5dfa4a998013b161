"""Small model folders without weights, and the ways in which one can differ from another."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kv_transfer.api import Contract
from workers.profile.fingerprint import contract_from, contract_of
from workers.profile.model_folder import read_folder
from workers.profile.schema import ModelProfile, parse_profile

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "transformers_version": "5.19.0",
}
TOKENIZER: Final[dict[str, Any]] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 3, "content": "<end>"}],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
}
TOKENIZER_CONFIG: Final[dict[str, Any]] = {"eos_token": "<end>", "tokenizer_class": "TokenizersBackend"}
TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
RECORD: Final = {"source": "model.gguf", "source_sha256": "ab" * 32}


@dataclass(frozen=True)
class Difference:
    """One way to differ."""

    change: Callable[[Path], None]
    named: str
    """What a message about it says, ours first."""
    scales_sha256: str = ""


def write_model(folder: Path) -> Path:
    folder.mkdir()
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
        ("phasegate.json", RECORD),
    ):
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def edit(folder: Path, name: str, **changed: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    content = json.loads((folder / name).read_text()) | changed
    (folder / name).write_text(
        json.dumps({key: value for key, value in content.items() if value is not None})
    )


def _rope(folder: Path) -> None:
    edit(folder, "config.json", rope_parameters={"rope_theta": 100000.0, "rope_type": "default"})


def _tokenizer(folder: Path) -> None:
    model = TOKENIZER["model"] | {"vocab": {"a": 1, "b": 0, "ab": 2}}
    edit(folder, "tokenizer.json", model=model)


def _template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("{% endfor %}", "\n{% endfor %}"))


DIFFERENCES: Final = {
    "revision": Difference(
        lambda folder: edit(folder, "phasegate.json", source_sha256="cd" * 32),
        "source: revision abababababababab... against cdcdcdcdcdcdcdcd...",
    ),
    "tokenizer": Difference(_tokenizer, "tokenizer: sha256 "),
    "chat template": Difference(_template, "chat template: characters 65 against 66, sha256 "),
    "rope": Difference(_rope, "rope: theta 10000 against 100000"),
    "scale file": Difference(
        lambda folder: None,
        "scale file: sha256 none against efefefefefefefef...",
        scales_sha256="ef" * 32,
    ),
    "kv geometry": Difference(
        lambda folder: edit(folder, "config.json", num_key_value_heads=4), "kv geometry: heads 2 against 4"
    ),
    "architecture": Difference(
        lambda folder: edit(folder, "config.json", hidden_act="gelu"),
        "architecture: hidden act silu against gelu",
    ),
}
"""By name: what must keep two engines apart."""


def profile(**changed: Any) -> ModelProfile:
    raw = {"name": "m", "model_id": "m", "weights": {"path": "/m"}, "context_length": 512, **changed}
    return parse_profile(raw, source="test")


def contracts(tmp_path: Path, difference: Difference) -> tuple[Contract, Contract]:
    """Read off two folders that differ so and not otherwise."""
    one, other = write_model(tmp_path / "one"), write_model(tmp_path / "other")
    difference.change(other)
    return contract_of(profile(), one), contract_from(
        read_folder(other), scales_sha256=difference.scales_sha256
    )
