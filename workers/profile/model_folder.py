"""What a model's folder says of the model beside its weights. Reads files; judges nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

RECORD: Final = "phasegate.json"
"""Where a folder that was made from another says what it was made from."""
_OTHER_TOKENIZERS: Final = ("tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")


class ModelFolderError(ValueError):
    """A file is missing or is not what it should be. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Empty where the folder says nothing."""

    config: Mapping[str, Any]
    tokenizer: Mapping[str, Any]
    """Of `tokenizer.json`."""
    other_tokenizers: Mapping[str, bytes]
    """Tokenizers of other kinds, by file: read where there is no `tokenizer.json`."""
    tokenizer_config: Mapping[str, Any]
    chat_template: str
    record: Mapping[str, Any]


def read_folder(folder: Path) -> ModelFolder:
    """Takes a fraction of a second: large tokenizers are read whole.

    Raises:
        ModelFolderError: there is no `config.json`, or a file is not JSON.
    """
    config = _object(folder / "config.json")
    if not config:
        raise ModelFolderError(f"{folder / 'config.json'} is missing or empty")
    tokenizer = _object(folder / "tokenizer.json")
    tokenizer_config = _object(folder / "tokenizer_config.json")
    others = {} if tokenizer else {name: _bytes(folder / name) for name in _OTHER_TOKENIZERS}
    return ModelFolder(
        config=config,
        tokenizer=tokenizer,
        other_tokenizers={name: data for name, data in others.items() if data},
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(folder, tokenizer_config),
        record=_object(folder / RECORD),
    )


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """In the order in which transformers looks for it."""
    if own := _bytes(folder / "chat_template.jinja"):
        return own.decode(errors="replace")
    found = _object(folder / "chat_template.json").get("chat_template") or tokenizer_config.get(
        "chat_template"
    )
    if found is None or isinstance(found, str):
        return found or ""
    return msgspec.json.encode(found, order="sorted").decode()  # several, each with a name


def _object(file: Path) -> Mapping[str, Any]:
    data = _bytes(file)
    if not data:
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as bad:
        raise ModelFolderError(f"{file} is not a JSON object: {bad}") from None


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as bad:
        raise ModelFolderError(f"{file} cannot be read: {bad.strerror}") from None
