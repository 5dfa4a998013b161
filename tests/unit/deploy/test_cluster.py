import os
from pathlib import Path

import pytest

from deploy.cluster import keep_logs


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A scratch folder with the logs of a session, in which a file, a folder and a socket lie."""
    logs = tmp_path / "ray" / "session_x" / "logs"
    (logs / "serve").mkdir(parents=True)
    (logs / "raylet.out").write_text("said")
    (logs / "serve" / "controller.log").write_text("said")
    os.mkfifo(logs / "pipe")
    (tmp_path / "ray" / "session_latest").symlink_to("session_x")
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_rays_logs_outlive_the_scratch_folder_in_place_of_those_of_the_run_before(
    scratch: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "logs"
    (kept / "ray" / "older").mkdir(parents=True)

    keep_logs(scratch, kept)

    assert names(kept / "ray") == ["raylet.out", "serve", "serve/controller.log"]


def test_logs_that_cannot_be_kept_do_not_keep_the_system_from_stopping(scratch: Path, tmp_path: Path) -> None:
    """As on a full disk: what was copied by half goes."""
    (scratch / "ray" / "session_x" / "logs" / "gone").symlink_to("nowhere")
    blocked = tmp_path / "logs"
    blocked.write_text("a file in the way")

    keep_logs(scratch, blocked)

    assert blocked.read_text() == "a file in the way"


def test_there_is_nothing_to_keep_of_a_cluster_that_never_was(tmp_path: Path) -> None:
    keep_logs(tmp_path, tmp_path / "logs")

    assert not (tmp_path / "logs").exists()
