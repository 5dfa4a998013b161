"""The test's end of `cell_engine`: two engines, with integrity on and off, that play the same scenes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tests.support.cell_words import Played, Scene

ROOT: Final = Path(__file__).parents[2]
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class CellProcess:
    def __init__(self, mode: str, model_dir: str) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cell_engine", mode, *([model_dir] if model_dir else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
        )

    def ask(self, scene: Scene) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(scene) + b"\n")
        self._process.stdin.flush()

    def played(self) -> Played:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):  # vLLM prints, too
                return msgspec.json.decode(line, type=Played)
        self._errors.seek(0)
        raise RuntimeError(f"the engine died:\n{self._errors.read()[-4000:].decode()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Pair(NamedTuple):
    checked: Played
    unchecked: Played


class CellPair:
    def __init__(self, model_dir: str = "") -> None:
        """`model_dir`: folder of a model; empty: two layers with random weights."""
        self._model_dir = model_dir
        self._engines = {mode: CellProcess(mode, model_dir) for mode in ("on", "off")}
        self._calm: dict[bytes, Pair] = {}

    def calm(self, scene: Scene) -> Pair:
        """Played once, however often it is asked for."""
        key = msgspec.json.encode(scene)
        if key not in self._calm:
            self._calm[key] = self.play(scene)
        return self._calm[key]

    def play(self, scene: Scene) -> Pair:
        for engine in self._engines.values():
            engine.ask(scene)
        played = {mode: engine.played() for mode, engine in self._engines.items()}
        for mode in [mode for mode, of_mode in played.items() if of_mode.died]:
            self._engines[mode].close()
            self._engines[mode] = CellProcess(mode, self._model_dir)
        return Pair(played["on"], played["off"])

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
