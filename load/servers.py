"""The two systems that are compared, started as processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from load.client import Target

START_TIMEOUT_S = 300.0


class NotReady(Exception):
    """A system under test did not start; the message has its last lines."""


@contextmanager
def phasegate(folder: Path, *, profile: str, port: int) -> Iterator[tuple[Target, Path]]:
    """`phasegate up`, and its state folder."""
    state = folder / "state"
    command = [sys.executable, "-m", "deploy.cli"]
    up = [*command, "up", "--profile", profile, "--state", str(state), "--port", str(port), "--detach"]
    try:
        started = subprocess.run(up, capture_output=True, text=True, check=False)
        if started.returncode:
            raise NotReady(f"{started.stdout}\n{started.stderr}")
        local = json.loads((state / "local.json").read_text())
        yield Target("phasegate", local["base_url"], local["models"][0], local["api_key"]), state
    finally:
        subprocess.run([*command, "down", "--state", str(state)], capture_output=True, check=False)


@contextmanager
def plain_vllm(
    folder: Path, *, model_dir: Path, dtype: str, context: int, block_size: int, threads: int, port: int
) -> Iterator[Target]:
    """One vLLM OpenAI server, eager and in one process like our engines, with this many threads."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model_dir), "--served-model-name", "plain", "--dtype", dtype]
    command += ["--max-model-len", str(context), "--block-size", str(block_size), "--enforce-eager"]
    command += ["--distributed-executor-backend", "uni", "--host", "127.0.0.1", "--port", str(port)]
    log = folder / "plain.log"
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
        try:
            _await(server, f"http://127.0.0.1:{port}/health", log)
            yield Target("plain", f"http://127.0.0.1:{port}", "plain")
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)


def _await(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=2, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise NotReady("\n".join(log.read_text(errors="replace").splitlines()[-20:]))
