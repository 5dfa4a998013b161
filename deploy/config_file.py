"""Puts the configuration together: defaults, the file above them, the command line above both.

All mistakes are gathered before anything is said: by `phasegate up`, `config check` and `config show`.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import yaml

from deploy.config import SystemConfig, examine, leaves
from deploy.production import refusals
from deploy.yaml_file import ConfigError, Document, Mistake, read_document, told

COMMAND_LINE: Final = "command line"
HIDDEN: Final = "(hidden)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A configuration with all that is wrong with it."""

    config: SystemConfig
    """Bad keys are at their defaults here."""
    mistakes: tuple[Mistake, ...]
    origins: Mapping[str, str]
    """By dotted key: `command line`, or the file and line. What is not named is a default."""
    source: str

    @property
    def doubtful(self) -> frozenset[str]:
        """Top-level keys at or below which something is wrong: what they say is not to be relied on."""
        return frozenset(mistake.key.split(".")[0] for mistake in self.mistakes)


def gather(
    path: Path | None,
    *,
    profile: str | None = None,
    port: int | None = None,
    internal_port: int | None = None,
) -> Gathered:
    """Everything that the file, if any, and the command line say.

    Raises:
        ConfigError: the file cannot be read, or is not YAML.
    """
    document = Document(value=None) if path is None else read_document(path)
    options = {"profile": profile, "port": port, "internal_port": internal_port}
    chosen = {key: value for key, value in options.items() if value is not None}
    origins = {key: f"{path}:{line}" for key, line in document.lines.items()}
    origins |= dict.fromkeys(chosen, COMMAND_LINE)
    raw, mistakes = document.value, list(document.mistakes)
    if raw is None or isinstance(raw, Mapping):
        raw = {**(raw or {}), **chosen}
    config, wrong = examine(raw)
    mistakes += [_placed(mistake, document.lines, frozenset(chosen)) for mistake in wrong]
    if config is None:
        config = _without(raw, wrong)
    mistakes += refusals(config)
    return Gathered(
        config=config, mistakes=tuple(mistakes), origins=origins, source=str(path or "configuration")
    )


def load(
    path: Path | None,
    *,
    profile: str | None = None,
    port: int | None = None,
    internal_port: int | None = None,
) -> SystemConfig:
    """The file, if any, with what the command line says on top.

    Raises:
        ConfigError: with one line for each mistake, what mode `production` refuses included.
    """
    found = gather(path, profile=profile, port=port, internal_port=internal_port)
    if found.mistakes:
        raise ConfigError(told(found.source, found.mistakes))
    return found.config


def show(found: Gathered) -> str:
    """The effective configuration as YAML, each value with where it comes from. Secrets are not in it."""
    rows = [(key, _shown(value, secret)) for key, value, secret in leaves(found.config)]
    width = max(len(_yaml_line(key, value)) for key, value in rows)
    lines: list[str] = []
    section = ""
    for key, value in rows:
        above, _, _ = key.rpartition(".")
        if above != section and above:
            lines.append(f"{above}:")
        section = above
        lines.append(f"{_yaml_line(key, value):<{width}}  # {found.origins.get(key, 'default')}")
    return "\n".join(lines)


def _yaml_line(key: str, value: Any) -> str:
    above, _, name = key.rpartition(".")
    text = yaml.safe_dump({name: value}, default_flow_style=True, width=1_000_000).strip()[1:-1]
    return f"{'  ' * bool(above)}{text}"


def _shown(value: Any, secret: bool) -> Any:
    if not secret or value is None:
        return value
    try:
        parts = urlsplit(str(value))
        host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
        place = f"{host}:{parts.port}" if parts.port else host
    except ValueError:
        return HIDDEN
    if not parts.scheme:
        return HIDDEN
    who = f"{HIDDEN}@" if "@" in parts.netloc else ""
    # A query may hold a password, too.
    return urlunsplit((parts.scheme, f"{who}{place}", parts.path, HIDDEN if parts.query else "", ""))


def _placed(mistake: Mistake, lines: Mapping[str, int], chosen: frozenset[str]) -> Mistake:
    """The mistake with where it was made."""
    if mistake.key in chosen:
        return Mistake(mistake.key, f"{mistake.text} ({COMMAND_LINE})")
    line = lines.get(mistake.key)
    return mistake if line is None else Mistake(mistake.key, f"{mistake.text} (line {line})")


def _without(raw: object, mistakes: list[Mistake]) -> SystemConfig:
    """The configuration that remains when the bad keys are left out."""
    kept = deepcopy(raw) if isinstance(raw, Mapping) else {}
    for path in _paths(mistakes):
        _remove(kept, path)
    config, still = examine(kept)
    return SystemConfig() if still or config is None else config


def _paths(mistakes: list[Mistake]) -> Iterator[list[str]]:
    for mistake in mistakes:
        yield mistake.key.split(".")


def _remove(mapping: Any, path: list[str]) -> None:
    *above, last = path
    for name in above:
        mapping = mapping.get(name) if isinstance(mapping, dict) else None
    if isinstance(mapping, dict):
        mapping.pop(last, None)
