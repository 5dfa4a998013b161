"""Finds model profiles by name: those that ship with the project, and those the user registered."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from deploy.model_store import ModelError, inspect_own
from deploy.yaml_file import ConfigError, read_yaml

SHIPPED: Final = Path(__file__).parent / "models"
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class ProfileFile:
    name: str
    path: Path
    own: bool
    """Registered by the user, not shipped."""


def own_dir(cache: Path) -> Path:
    return cache / "profiles"


def known(cache: Path) -> list[ProfileFile]:
    """Every profile that `--profile NAME` accepts, by name; an own one never hides a shipped one."""
    own = [ProfileFile(p.stem, p, own=True) for p in own_dir(cache).glob("*.yaml")]
    shipped = [ProfileFile(p.stem, p, own=False) for p in SHIPPED.glob("*.yaml")]
    return sorted({p.name: p for p in own + shipped}.values(), key=lambda p: p.name)


def find(name: str, cache: Path) -> Path:
    """The file of a profile, by its name or by its path.

    Raises:
        ConfigError: there is none; the message lists the names.
    """
    for profile in known(cache):
        if profile.name == name:
            return profile.path
    if ("/" in name or name.endswith((".yaml", ".yml"))) and Path(name).is_file():
        return Path(name)
    names = ", ".join(profile.name for profile in known(cache))
    raise ConfigError(
        f"profile: no profile is called {name!r}; there are {names} (or give the path of a file)"
    )


def read(name: str, cache: Path) -> tuple[object, str]:
    """The profile as read from YAML, and where it came from, for error messages."""
    path = find(name, cache)
    return read_yaml(path), str(path)


def add(folder: Path, name: str | None, cache: Path) -> ProfileFile:
    """Registers a model folder under a short profile. Registering the same folder again changes nothing.

    Raises:
        ModelError: the folder cannot be served, or the name is taken or unusable.
    """
    model = inspect_own(folder)
    name = name or re.sub(r"[^a-z0-9._-]+", "-", model.folder.name.lower()).strip("-._")
    if not NAME.fullmatch(name):
        raise ModelError(
            f"name {name!r} must be letters, digits, '.', '_' or '-', all lower case: give --name"
        )
    target = own_dir(cache) / f"{name}.yaml"
    text = yaml.safe_dump(
        {
            "name": name,
            "model_id": f"@local/{name}",
            "weights": {"path": str(model.folder)},
            "context_length": model.context_length,
        },
        sort_keys=False,
    )
    if (SHIPPED / f"{name}.yaml").exists():
        raise ModelError(f"the name {name!r} is taken by a profile that ships with phasegate: give --name")
    if target.exists() and target.read_text() != text:
        raise ModelError(f"the name {name!r} is taken: remove {target}, or give another --name")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    return ProfileFile(name, target, own=True)
