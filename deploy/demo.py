"""`make demo`: the whole system on this machine, two requests through both engines, and away again."""

import argparse
import io
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx

from deploy.control import ControlError, ask
from deploy.signals import TOLD_TO_STOP
from deploy.state import read_private

QUESTION: Final = "What is the capital of Japan?"
"""No format of the cache brings another answer near: the small model is not sure of every capital."""
CHAT: Final = "Name three colours of the rainbow."
REQUEST_TIMEOUT_S: Final = 120.0
SUMMARY_TIMEOUT_S: Final = 5.0
_CLI: Final = (sys.executable, "-m", "deploy.cli")


class DemoFailed(Exception):
    """The demonstration did not show what it should; the message says where it stopped."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.demo", description=__doc__)
    parser.add_argument("--profile", help="a model profile (default: that of `phasegate up`)")
    profile: str | None = parser.parse_args(arguments).profile
    chosen = () if profile is None else ("--profile", profile)
    # Our lines and those of the commands that we run go to the same place, which may be a pipe.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="phasegate-demo-") as folder,
            system(Path(folder), chosen=chosen) as local,
        ):
            native = _native(local)
            _explain(Path(folder), native)
            chat = _chat(local)
            _explain(Path(folder), chat)
    except DemoFailed as bad:
        print(f"demo: error: {bad}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped", file=sys.stderr)
        return 130
    print("demo: done; everything is stopped")
    return 0


@contextmanager
def system(state: Path, cli: Sequence[str] = _CLI, *, chosen: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Up, ready, and down again whatever happens: also when a signal comes at any moment.

    Takes the signals over.

    Args:
        chosen: options of `up`, besides those that keep this system apart from others.
    """
    for number in TOLD_TO_STOP:
        # Also SIGINT: a shell's background job inherits it ignored, and would hand that on to `up`.
        signal.signal(number, _interrupt)
    try:
        _start(state, cli, chosen)
        yield read_private(state / "local.json")
    finally:
        for number in TOLD_TO_STOP:
            signal.signal(number, signal.SIG_IGN)  # stopping is bounded, and must not be cut short
        if subprocess.run([*cli, "down", "--state", str(state)], check=False).returncode:
            print("demo: the system did not stop cleanly", file=sys.stderr)


def _start(state: Path, cli: Sequence[str], chosen: Sequence[str]) -> None:
    """In a session of its own: a Ctrl-C reaches us alone, and we pass it on once.

    Raises:
        DemoFailed: it did not start.
    """
    argv = [*cli, "up", "--state", str(state), "--port", str(_free_port())]
    argv += ["--internal-port", "0", "--detach", *chosen]
    with subprocess.Popen(argv, start_new_session=True) as up:
        try:
            code = up.wait()
        except BaseException:
            up.send_signal(signal.SIGINT)  # it ends the supervisor, which only it knows of so early
            up.wait()
            raise
    if code:
        raise DemoFailed("the system did not start")


def _native(local: dict[str, Any]) -> str:
    """A Workers-AI-style run; returns the request's id."""
    url = f"{local['base_url']}/client/v4/accounts/{local['account_id']}/ai/run/{local['models'][0]}"
    print(f"\nPOST /client/v4/accounts/.../ai/run/{local['models'][0]}\n> {QUESTION}")
    body = {"prompt": QUESTION, "max_tokens": 32, "temperature": 0}
    try:
        answer = httpx.post(url, json=body, headers=_key(local), timeout=REQUEST_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as bad:
        raise DemoFailed(f"the native run failed: {bad!r}") from None
    if answer.status_code != 200:
        raise DemoFailed(f"the native run was answered {answer.status_code}: {answer.text}")
    print(answer.json()["result"]["response"])
    return answer.headers["x-request-id"]


def _chat(local: dict[str, Any]) -> str:
    """An OpenAI chat, printed as it streams; returns the request's id."""
    import openai

    print(f"\nPOST /v1/chat/completions, streamed to the OpenAI client\n> {CHAT}")
    with openai.OpenAI(
        base_url=f"{local['base_url']}/v1",
        api_key=local["api_key"],
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
    ) as client:
        try:
            raw = client.chat.completions.with_raw_response.create(
                model=local["models"][0],
                messages=[{"role": "user", "content": CHAT}],
                max_tokens=48,
                temperature=0,
                stream=True,
            )
            for chunk in raw.parse():
                for choice in chunk.choices:
                    print(choice.delta.content or "", end="", flush=True)
        except openai.OpenAIError as bad:
            raise DemoFailed(f"the chat failed: {bad}") from None
    print()
    return raw.headers["x-request-id"]


def _explain(state: Path, request_id: str) -> None:
    """One line: the path that the request took."""
    row = _summary(state, request_id)
    ttft_ms = (row["ttft_s"] or 0) * 1000
    rate = f"{row['tokens_per_s']:.1f} tokens/s" if row["tokens_per_s"] else "one token"
    print(
        f"  path: prefill {row['prefill_replica']} -> decode {row['decode_replica']} | "
        f"{row['handoff']}: {row['pages']} pages, {row['wire_bytes'] / 1024:.0f} KiB | "
        f"TTFT {ttft_ms:.0f} ms, {rate}, {row['prompt_tokens']} + {row['output_tokens']} tokens"
    )
    if row["handoff"] != "shipped":
        raise DemoFailed(f"no pages were shipped between the engines: {row['handoff']}")


def _summary(state: Path, request_id: str) -> dict[str, Any]:
    """The gateway notes a request when its last byte is out, which may be after we have read it."""
    control_socket = json.loads((state / "runtime.json").read_text())["control_socket"]
    deadline = time.monotonic() + SUMMARY_TIMEOUT_S
    while True:
        try:
            return ask(control_socket, "GET", f"/requests/{request_id}")
        except ControlError as bad:
            if time.monotonic() > deadline:
                raise DemoFailed(f"nothing is known of request {request_id}: {bad}") from None
            time.sleep(0.1)


def _key(local: dict[str, Any]) -> dict[str, str]:
    return {"authorization": f"Bearer {local['api_key']}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
