"""The system's configuration: one optional YAML file over defaults, and where things lie on disk.

The only module that reads the configuration file and the environment. Every mistake is reported at once,
each with its path; an unknown key is a mistake.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

STRICT: ConfigDict = {"extra": "forbid", "strict": True}
PROFILE_DEFAULT = "smollm2-135m"
PORT_DEFAULT = 8600


class ConfigError(ValueError):
    """The file does not describe a system that can be started. The message names every bad key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    __pydantic_config__: ClassVar = STRICT

    state_url: str | None = field(default=None, repr=False)
    """Redis for keys and tenants. None: local mode starts its own."""

    def __post_init__(self) -> None:
        if self.state_url is not None and not self.state_url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("state_url must start with redis://, rediss:// or unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    __pydantic_config__: ClassVar = STRICT

    max_body_bytes: int = 10_000_000
    max_in_flight: int = 256
    """Requests that one gateway answers at once."""
    request_timeout_s: float = 600.0
    silence_s: float = 10.0
    """An engine silent on the token bus for so long is taken for dead."""

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_in_flight", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.silence_s < 3:
            raise ValueError(
                f"silence_s must be at least 3 (heartbeats come each second), not {self.silence_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TestingConfig:
    """Faults made on purpose. Refused outside mode `dev`."""

    __pydantic_config__: ClassVar = STRICT
    __test__: ClassVar = False

    drop_bus_frame: int | None = None
    """Each decode replica loses its Nth frame with tokens, once."""
    holds: str | None = None
    """Folder of barriers that keep requests in a stage; an absolute path."""

    def __post_init__(self) -> None:
        if self.drop_bus_frame is not None and self.drop_bus_frame < 1:
            raise ValueError(f"drop_bus_frame counts from 1, not {self.drop_bus_frame}")
        if self.holds is not None and not Path(self.holds).is_absolute():
            raise ValueError("holds must be an absolute path")


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemConfig:
    __pydantic_config__: ClassVar = STRICT

    mode: Literal["dev", "production"] = "dev"
    host: str = "127.0.0.1"
    port: int = PORT_DEFAULT
    profile: str = PROFILE_DEFAULT
    """Name of a model profile, or path of its file."""
    redis: RedisConfig = RedisConfig()
    limits: LimitsConfig = LimitsConfig()
    testing: TestingConfig = TestingConfig()

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port must be between 1 and 65535, not {self.port}")
        if self.mode == "production" and self.testing != TestingConfig():
            raise ValueError("testing is refused in mode production")


def parse(raw: object, *, source: str) -> SystemConfig:
    """The configuration in `raw`, as read from YAML; an empty file means the defaults.

    Raises:
        ConfigError: with one line for each mistake.
    """
    try:
        # As JSON: a strict check of Python values would want instances of our classes, not mappings.
        text = json.dumps({} if raw is None else raw, default=str, allow_nan=False)
    except (TypeError, ValueError) as bad:
        raise ConfigError(f"{source}: not a plain mapping: {bad}") from None
    try:
        return TypeAdapter(SystemConfig).validate_json(text)
    except ValidationError as bad:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'configuration'}: {e['msg']}" for e in bad.errors()]
        raise ConfigError(f"{source}:\n  " + "\n  ".join(lines)) from None


def read_yaml(path: Path) -> object:
    """What is in the file.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        loaded: object = yaml.safe_load(path.read_text())
    except OSError as bad:
        raise ConfigError(f"{path}: {bad.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as bad:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(bad).split())}") from None
    return loaded


def load(path: Path | None, *, profile: str | None = None, port: int | None = None) -> SystemConfig:
    """The file, if any, with what the command line says on top.

    Raises:
        ConfigError: with one line for each mistake.
    """
    config = SystemConfig() if path is None else parse(read_yaml(path), source=str(path))
    changes: dict[str, Any] = {}
    if profile is not None:
        changes["profile"] = profile
    if port is not None:
        changes["port"] = port
    try:
        return replace(config, **changes)
    except ValueError as bad:
        raise ConfigError(f"command line: {bad}") from None


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Prepared models and own profiles: shared by all state folders."""
    if chosen := env.get("PHASEGATE_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "~")).expanduser() / ".cache"
    return Path(base) / "phasegate"


def default_state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """State of the one system that a user runs without saying where."""
    base = env.get("XDG_STATE_HOME") or Path(env.get("HOME", "~")).expanduser() / ".local" / "state"
    return Path(base) / "phasegate"
