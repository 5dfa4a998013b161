"""An engine in a process of its own, told over its standard input what to do: a line of JSON each way."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any, Final

from load.manifest import ROOT
from load.servers import ServerFailed, engine_environment, tail

PROGRAM: Final = "kv_transfer.testing.cost"
TRIALS: Final = "workers.trials"
STOP_TIMEOUT_S: Final = 20.0
LOOPBACK: Final = {"GLOO_SOCKET_IFNAME": "lo"}
"""Where our connector binds its links."""


@dataclass(frozen=True, eq=False)
class EngineProcess:
    """No two are equal."""

    orders: IO[bytes]
    answers: IO[bytes]
    ready: Mapping[str, Any] = field(default_factory=dict)
    """What it told when it had started."""

    def ask(self, order: Mapping[str, Any]) -> Any:
        """
        Args:
            order: what is to be started first, then `type` and the fields of that type in the program.

        Raises:
            ServerFailed: the process ended.
        """
        try:
            self.orders.write(json.dumps(order).encode() + b"\n")
            self.orders.flush()
        except BrokenPipeError:
            raise ServerFailed("the engine process ended") from None
        line = self.answers.readline()
        if not line:
            raise ServerFailed("the engine process ended")
        return json.loads(line)


@contextmanager
def engine_process(
    start: Mapping[str, Any], *, threads: int, cache_gib: int, program: str = PROGRAM
) -> Iterator[EngineProcess]:
    """Started, and gone afterwards whatever happens. `ServerFailed` has its last words."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", program],
            cwd=ROOT,
            env=os.environ | engine_environment(threads, cache_gib) | LOOPBACK,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        engine = EngineProcess(process.stdin, process.stdout)
        try:
            yield replace(engine, ready=engine.ask(start))
        except ServerFailed as bad:
            raise ServerFailed(f"{bad}\n{tail(log)}") from None
        finally:
            engine.orders.close()
            engine.answers.close()
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print("load: an engine process does not stop and is killed", file=sys.stderr)
                process.kill()
                process.wait()
