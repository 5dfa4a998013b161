from pathlib import Path

import psutil
import pytest

from deploy.detach import DetachError, start
from deploy.state import open_state


def test_a_supervisor_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    said: list[str] = []

    with pytest.raises(DetachError, match=r"exit status 1[\s\S]*absent\.yaml: No such file"):
        start(
            ["--config", str(tmp_path / "absent.yaml")],
            open_state(tmp_path / "state"),
            say=said.append,
        )
    assert any("absent.yaml" in line for line in said)


def test_a_supervisor_that_is_not_ready_in_time_is_stopped_again(tmp_path: Path) -> None:
    before = {process.pid for process in psutil.Process().children()}
    clock = iter([0.0, 1000.0])

    with pytest.raises(DetachError, match="was not ready after"):
        start(
            ["--state", str(tmp_path / "state")],
            open_state(tmp_path / "state"),
            say=lambda _: None,
            now=lambda: next(clock),
        )

    assert {process.pid for process in psutil.Process().children()} <= before
