import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.state import StateLock, open_state

ROOT = Path(__file__).parents[3]

Output = pytest.CaptureFixture[str]


def phasegate(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own: `up` takes signals over."""
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "PHASEGATE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["up", "--port", "many"], "--port: invalid int value: 'many'"),
        (["up", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["chat", "--max-tokens", "0"], "--max-tokens: must be at least 1, not 0"),
        (["key"], "COMMAND"),
        (["key", "revoke"], "required: id"),
        (["model", "prepare"], "required: name"),
    ],
)
def test_wrong_arguments_end_with_2_and_name_what_is_wrong(
    arguments: list[str], said: str, capsys: Output
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status"], "nothing runs with state folder"),
        (["chat", "hello"], "nothing runs with state folder"),
        (["key", "list"], "nothing runs with state folder"),
        (["key", "create", "--expires", "soon"], "--expires: 'soon'"),
        (["up", "--detach", "--port", "0"], "port must be between 1 and 65535"),
        (["up", "--detach", "--config", "/absent.yaml"], "/absent.yaml: No such file"),
    ],
)
def test_a_command_that_cannot_be_done_ends_with_1_and_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: Output
) -> None:
    assert main([*arguments, "--state", str(tmp_path)]) == 1

    error = capsys.readouterr().err
    assert error.startswith("phasegate: error: ")
    assert said in error
    assert len(error.splitlines()) == 1


def test_down_is_content_when_nothing_runs(tmp_path: Path, capsys: Output) -> None:
    assert main(["down", "--state", str(tmp_path)]) == 0
    assert "nothing runs" in capsys.readouterr().out


def test_a_second_system_in_one_folder_is_refused_with_the_pid_of_the_first(
    tmp_path: Path, capsys: Output
) -> None:
    lock = StateLock(open_state(tmp_path))
    lock.acquire()
    try:
        assert main(["up", "--detach", "--state", str(tmp_path)]) == 1
    finally:
        lock.release()

    assert f"already running with state folder {tmp_path} (pid {os.getpid()})" in capsys.readouterr().err


def test_an_unknown_profile_is_refused_and_nothing_stays(tmp_path: Path) -> None:
    ran = phasegate("up", "--profile", "nope", "--state", str(tmp_path / "s"), cache=tmp_path / "cache")

    assert ran.returncode == 1
    assert "no profile is called 'nope'" in ran.stderr
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"lock", "logs"}


def test_a_taken_port_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])

        ran = phasegate(
            "up", "--detach", "--port", port, "--state", str(tmp_path / "s"), cache=tmp_path / "c"
        )

    assert ran.returncode == 1
    assert f"port {port} on 127.0.0.1 cannot be used (Address already in use)" in ran.stderr
    assert "--port" in ran.stderr
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"lock", "logs"}
    assert not (tmp_path / "c").exists()


def test_models_can_be_added_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("PHASEGATE_CACHE", str(tmp_path / "cache"))

    assert main(["model", "add", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    assert main(["model", "list"]) == 0
    listed = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert listed == [["exact", "shipped"], ["smollm2-135m", "shipped"]]
