"""Reads a YAML file as plain data, and finds what YAML allows but a configuration must not hold.

A key given twice (YAML keeps the last one in silence), a key that is not text, an alias inside itself.
Each mistake carries its path and its line; they do not hide those that the schema finds afterwards.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import yaml

_TEXT: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True, order=True)
class Mistake:
    """One thing that is wrong with a configuration."""

    key: str
    """Dotted path of the key at fault."""
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class ConfigError(ValueError):
    """The configuration describes no system that can be started. The message names every bad key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What a file holds."""

    value: object
    """None when the file is empty, or when it cannot be told as plain data at all."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """By dotted path of a key: the line of its first appearance, from 1."""
    mistakes: tuple[Mistake, ...] = ()


def read_document(path: Path) -> Document:
    """The file's content with the mistakes that make it ambiguous.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        root = yaml.compose(path.read_text(), Loader=yaml.SafeLoader)
    except OSError as bad:
        raise ConfigError(f"{path}: {bad.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as bad:
        raise _not_yaml(path, bad) from None
    if root is None:
        return Document(value=None)
    lines: dict[str, int] = {}
    mistakes = list(_look(root, (), lines, set(), set()))
    try:
        value = _build(root)
    except (yaml.YAMLError, ValueError, RecursionError) as bad:
        if not mistakes:
            raise _not_yaml(path, bad) from None
        value = None
    return Document(value=value, lines=lines, mistakes=tuple(mistakes))


def read_yaml(path: Path) -> object:
    """The file's content.

    Raises:
        ConfigError: it cannot be read, is not YAML, or is ambiguous; with one line for each mistake.
    """
    document = read_document(path)
    if document.mistakes:
        raise ConfigError(told(str(path), document.mistakes))
    return document.value


def told(source: str, mistakes: tuple[Mistake, ...] | list[Mistake]) -> str:
    """The message that lists them; one alone stands in the same line."""
    if len(mistakes) == 1:
        return f"{source}: {mistakes[0]}"
    return f"{source}:\n  " + "\n  ".join(map(str, mistakes))


def _not_yaml(path: Path, bad: Exception) -> ConfigError:
    # PyYAML quotes the line it stumbled over, which may hold a password: only its place is told.
    mark = getattr(bad, "problem_mark", None)
    where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
    what = getattr(bad, "problem", None) or type(bad).__name__
    return ConfigError(f"{path}: not YAML: {' '.join(str(what).split())}{where}")


def _build(root: yaml.Node) -> object:
    loader = yaml.SafeLoader("")
    try:
        built: object = loader.construct_document(root)
    finally:
        loader.dispose()
    return built


def _look(
    node: yaml.Node, path: tuple[str, ...], lines: dict[str, int], seen: set[int], inside: set[int]
) -> Iterator[Mistake]:
    """Mistakes below a node. `inside` holds the nodes on the way down, `seen` all that were looked at."""
    if id(node) in inside:
        yield Mistake(_dotted(path), f"line {_line(node)}: an alias inside itself")
        return
    if id(node) in seen:  # an alias repeats what is known; following it again could take for ever
        return
    seen.add(id(node))
    below = inside | {id(node)}
    if isinstance(node, yaml.MappingNode):
        yield from _look_at_keys(node, path, lines)
        for key, value in node.value:
            yield from _look(value, (*path, str(key.value)), lines, seen, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _look(value, (*path, str(index)), lines, seen, below)


def _look_at_keys(node: yaml.MappingNode, path: tuple[str, ...], lines: dict[str, int]) -> Iterator[Mistake]:
    first: dict[str, int] = {}
    for key, _ in node.value:
        if key.tag not in (_TEXT, _MERGE):
            yield Mistake(_dotted(path), f"line {_line(key)}: a key must be text")
            continue
        here = _dotted((*path, key.value))
        if key.value in first:
            yield Mistake(here, f"given twice, in lines {first[key.value]} and {_line(key)}")
        first.setdefault(key.value, _line(key))
        lines.setdefault(here, _line(key))


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path) or "configuration"


def _line(node: yaml.Node) -> int:
    line: int = node.start_mark.line + 1
    return line
