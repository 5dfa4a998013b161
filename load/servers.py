"""The two servers under comparison: started, found and stopped."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import httpx

from load.client import Target
from load.manifest import ROOT

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 20.0
SUMMARY_WAIT_S: Final = 3.0
PLAIN_MODEL: Final = "plain"


class ServerFailed(Exception):
    """A server did not start or answer; the message has its last words."""


@dataclass(frozen=True)
class Phasegate:
    """A running system, known by its state folder."""

    state: Path

    @property
    def target(self) -> Target:
        local = json.loads((self.state / "local.json").read_text())
        return Target("phasegate", local["base_url"], local["models"][0], local["api_key"])

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            [*_CLI, "status", "--state", str(self.state), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ServerFailed(f"no status: {done.stderr.strip()}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    @property
    def pid(self) -> int:
        """Of the process that started all others."""
        return int(self._runtime()["pid"])

    def _runtime(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / "runtime.json").read_text())
        return found

    def summary(self, request_id: str) -> dict[str, Any] | None:
        """The service's own figures of a request that has just ended; None when it knows none."""
        path = self._runtime()["control_socket"]
        deadline = time.monotonic() + SUMMARY_WAIT_S
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://control") as http:
            while True:
                answer = http.get(f"/requests/{request_id}")
                if answer.status_code == 200:
                    found: dict[str, Any] = answer.json()
                    return found
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.1)


@contextmanager
def phasegate(profile: Path, settings: Mapping[str, Any] | None = None) -> Iterator[Phasegate]:
    """`phasegate up`, ready, and down again whatever happens.

    Args:
        settings: of the configuration file; None: there is none.
    """
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        state = Path(folder) / "state"
        up = [*_CLI, "up", "--profile", str(profile), "--state", str(state), "--port", str(free_port())]
        up += ["--internal-port", "0"]
        if settings is not None:
            file = Path(folder) / "system.yaml"
            file.write_text(json.dumps(settings))  # which is YAML too
            up += ["--config", str(file)]
        try:
            if subprocess.run([*up, "--detach"], cwd=ROOT, check=False).returncode:
                raise ServerFailed("`phasegate up` failed")
            running = Phasegate(state)
            require_asked(running.status())
            yield running
        finally:
            subprocess.run([*_CLI, "down", "--state", str(state)], cwd=ROOT, check=False)


def require_asked(status: Mapping[str, Any]) -> None:
    """A figure must be of the profile that its manifest names.

    Raises:
        ServerFailed: another profile runs, since this processor cannot do a format of the one asked for.
    """
    if (instead := status["profile"]["instead"]) is not None:
        raise ServerFailed(f"not what was to be measured: {instead}")


@dataclass(frozen=True)
class Plain:
    target: Target
    pid: int


@contextmanager
def plain_vllm(
    profile: dict[str, Any],
    model_dir: Path,
    *,
    name: str = "vllm",
    threads: int | None = None,
    cache_gib: int | None = None,
) -> Iterator[Plain]:
    """One vLLM server as its own project ships it, with the prefill engine's settings; not yet ready.

    Call `wait_ready` before use, so that it starts while the other server does.

    Args:
        threads, cache_gib: None: what the prefill engine has.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "vllm.entrypoints.openai.api_server",
                *plain_options(profile, model_dir, port),
            ],
            env=os.environ | plain_environment(profile, threads, cache_gib),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Plain(Target(name, f"http://127.0.0.1:{port}", PLAIN_MODEL), process.pid)
        except ServerFailed as bad:
            raise ServerFailed(f"{bad}\n{tail(log)}") from None
        finally:
            _stop(process)


def plain_options(profile: dict[str, Any], model_dir: Path, port: int) -> list[str]:
    part = profile["prefill"]
    return [
        *("--model", str(model_dir), "--served-model-name", PLAIN_MODEL, "--dtype", part["dtype"]),
        *("--max-model-len", str(profile["context_length"]), "--block-size", str(profile["block_size"])),
        *("--max-num-seqs", str(part["max_sequences"])),
        *("--max-num-batched-tokens", str(part["max_batched_tokens"]), "--enable-chunked-prefill"),
        *("--distributed-executor-backend", "uni", "--enforce-eager"),
        *("--enable-prefix-caching", "--prefix-caching-hash-algo", "sha256_cbor"),
        *("--disable-log-stats", "--disable-uvicorn-access-log"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def plain_environment(
    profile: dict[str, Any], threads: int | None = None, cache_gib: int | None = None
) -> dict[str, str]:
    """As many threads and as much cache as the prefill engine has, unless told otherwise."""
    part = profile["prefill"]
    return engine_environment(threads or part["threads"], cache_gib or part["cache_gib"])


def engine_environment(threads: int, cache_gib: int) -> dict[str, str]:
    """Of a vLLM engine on CPU that is not ours."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def wait_ready(plain: Plain) -> None:
    """
    Raises:
        ServerFailed: the process ended, or does not answer in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{plain.target.base_url}/health", trust_env=False, timeout=5).status_code == 200:
                return
        if os.waitid(os.P_PID, plain.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            raise ServerFailed("the plain vLLM server ended")
        time.sleep(0.5)
    raise ServerFailed("the plain vLLM server is not ready in time")


def model_folder(profile: dict[str, Any]) -> Path:
    """Where `phasegate model prepare` put the embedded model that the profile names."""
    cache = os.environ.get("PHASEGATE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache or Path(home) / "phasegate") / "models" / str(profile["weights"]["embedded"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The server and its engine: they are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        print("load: the plain vLLM server does not stop and is killed", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: IO[bytes], size: int = 3000) -> str:
    end = log.seek(0, os.SEEK_END)
    log.seek(max(0, end - size))
    return log.read().decode(errors="replace")


_CLI: Final = (sys.executable, "-m", "deploy.cli")
