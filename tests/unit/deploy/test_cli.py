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
        (["up", "--detach", "--port", "0"], "port: Input should be greater than or equal to 1"),
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
    assert (
        f"port: {port} on 127.0.0.1 cannot be used (Address already in use by pid {os.getpid()}" in ran.stderr
    )
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
    shipped = ("exact", "glm-5.2", "kimi-k2.6", "qwen3-32b", "scripted", "smollm2-135m")
    shipped += ("smollm2-135m-bf16", "smollm2-135m-pools")
    assert listed == [[name, "shipped"] for name in shipped]


def test_config_check_tells_every_mistake_and_what_the_machine_lacks(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(
            f"mode: production\nport: {port}\nprofile: absent\ncolour: red\ntesting: {{drop_bus_frame: 1}}\n"
        )
        ran = phasegate("config", "check", "--config", str(file), "--state", str(file), cache=tmp_path)

    assert ran.returncode == 1
    lines = [line.strip() for line in ran.stderr.splitlines()]
    assert lines[0] == f"phasegate: error: {file}:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        *("colour", "testing.drop_bus_frame", "profile", "port", "state folder")
    ]


def test_config_check_of_a_good_file_says_so_and_makes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("profile: exact\nlimits: {max_in_flight: 8}\n")
    state = tmp_path / "state"

    ran = phasegate(
        "config", "check", "--config", str(file), "--state", str(state), "--port", "18613", cache=tmp_path
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == f"phasegate: {file}: nothing is wrong\n"
    assert not state.exists()


def test_config_show_tells_values_and_origins_and_no_secret(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("redis: {state_url: 'redis://:hunter2@localhost:6379/0'}\n")

    assert main(["config", "show", "--config", str(file), "--profile", "exact"]) == 0

    shown = capsys.readouterr().out
    assert "hunter2" not in shown
    assert "redis://(hidden)@localhost:6379/0" in shown
    assert "# command line" in shown
    assert f"# {file}:1" in shown
