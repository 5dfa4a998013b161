import os
import stat
import subprocess
import sys
from pathlib import Path

from deploy.logs import keep_bounded, tail

ROOT = Path(__file__).parents[3]


def logged(
    file: Path, *, lines: int, most_bytes: int, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    """A process of its own logs so many lines of 100 bytes and more."""
    script = (
        "import logging, resource, signal\nfrom pathlib import Path\nfrom deploy.logs import log_to_file\n"
        f"limit = {limit}\n"
        "if limit is not None:\n"
        "    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))\n"
        f"log_to_file(Path({str(file)!r}), most_bytes={most_bytes})\n"
        f"for number in range({lines}):\n"
        "    logging.getLogger('deploy.x').info('line %d %s', number, 'x' * 100)\n"
        "print('alive')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=15, check=False
    )


def test_a_replicas_log_is_private_and_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    file = tmp_path / "decode-x.log"

    ran = logged(file, lines=1000, most_bytes=10_000)

    assert ran.stdout == "alive\n"
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["decode-x.log", "decode-x.log.1"]
    assert all(path.stat().st_size <= 10_000 for path in files)
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert "line 999" in tail(file)[-1]


def test_a_process_whose_log_cannot_grow_goes_on_without_it(tmp_path: Path) -> None:
    """As on a full disk: every write past the limit fails."""
    ran = logged(tmp_path / "decode-x.log", lines=500, most_bytes=1_000_000, limit=4096)

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "alive\n", "")
    assert (tmp_path / "decode-x.log").stat().st_size <= 4096


def test_what_others_append_is_cut_and_they_go_on_at_the_new_end(tmp_path: Path) -> None:
    file = tmp_path / "redis.log"
    with file.open("ab") as writer:
        writer.write(b"old\n" * 1000)
        writer.flush()

        keep_bounded(tmp_path, most_bytes=1000)
        writer.write(b"new\n")

    assert file.read_bytes() == b"new\n"
    assert (tmp_path / "redis.log.1").read_bytes() == b"old\n" * 1000


def test_what_is_short_enough_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "supervisor.log").write_text("said\n")

    keep_bounded(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.log"]
    assert (tmp_path / "supervisor.log").read_text() == "said\n"


def test_of_replicas_files_the_oldest_go(tmp_path: Path) -> None:
    for age in range(6):
        file = tmp_path / f"decode-{age}.log"
        file.write_text("x")
        os.utime(file, (1000 - age, 1000 - age))
    (tmp_path / "redis.log").write_text("x")

    keep_bounded(tmp_path, most_files=2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["decode-0.log", "decode-1.log", "redis.log"]


def test_there_is_no_tail_of_no_file(tmp_path: Path) -> None:
    assert tail(tmp_path / "absent") == []
