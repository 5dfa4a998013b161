import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo import DemoFailed, system

ROOT = Path(__file__).parents[3]

COMMAND = """
import json, os, pathlib, sys
verb, state = sys.argv[1], pathlib.Path(sys.argv[3])
with (state / "told").open("a") as told:
    print(verb, *(word for word in sys.argv if word == "--colour=red"), file=told)
if verb == "up":
    {up}
"""
READY = """
    handle = os.open(state / "local.json", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(handle, json.dumps({"models": ["m"]}).encode())
"""
FAIL = "sys.exit(1)"
STARTING_FOR_EVER = """
    try:
        print("starting", flush=True)
        sys.stdin.read()
    except KeyboardInterrupt:
        with (state / "told").open("a") as told:
            print("interrupted", file=told)
        sys.exit(130)
"""


def command(folder: Path, up: str) -> list[str]:
    """A stand-in for `phasegate` that notes what it is told, and starts up as it is given."""
    script = folder / "command.py"
    script.write_text(COMMAND.replace("{up}", up.strip()))
    return [sys.executable, str(script)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def told(state: Path) -> list[str]:
    return (state / "told").read_text().split()


def test_a_system_that_was_ready_is_stopped(tmp_path: Path) -> None:
    with system(tmp_path, command(tmp_path, READY)) as local:
        assert local == {"models": ["m"]}
        assert told(tmp_path) == ["up"]

    assert told(tmp_path) == ["up", "down"]


def test_options_of_the_start_are_handed_on(tmp_path: Path) -> None:
    with system(tmp_path, command(tmp_path, READY), chosen=["--colour=red"]):
        assert told(tmp_path) == ["up", "--colour=red"]


def test_a_system_is_stopped_after_a_failure_in_between(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), system(tmp_path, command(tmp_path, READY)):
        raise ZeroDivisionError

    assert told(tmp_path) == ["up", "down"]


def test_a_start_that_fails_is_told_and_cleaned_up(tmp_path: Path) -> None:
    with pytest.raises(DemoFailed, match="did not start"), system(tmp_path, command(tmp_path, FAIL)):
        raise AssertionError("started")

    assert told(tmp_path) == ["up", "down"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("inherited", ["SIG_DFL", "SIG_IGN"])
def test_a_signal_during_the_start_is_passed_on_before_the_system_is_stopped(
    tmp_path: Path, number: signal.Signals, inherited: str
) -> None:
    """A background job of a shell inherits SIGINT ignored."""
    script = (
        f"import signal; signal.signal(signal.SIGINT, signal.{inherited})\n"
        "from pathlib import Path; from deploy.demo import system\n"
        f"with system(Path({str(tmp_path)!r}), {command(tmp_path, STARTING_FOR_EVER)!r}): pass\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as demo:
        assert demo.stdout is not None
        assert demo.stdout.readline() == b"starting\n"
        demo.send_signal(number)
        demo.wait(10)

    assert demo.returncode != 0
    assert told(tmp_path) == ["up", "interrupted", "down"]
