import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from deploy.processes import MARKER, marked
from deploy.redis_server import RedisError, RedisServer, answers, start_redis

PASSWORD = "correct-horse"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    running = start_redis(tmp_path / "redis", PASSWORD, tmp_path / "redis.log")
    yield running
    running.stop()


def test_it_answers_who_knows_the_password_and_nobody_else(server: RedisServer) -> None:
    assert answers(server.port, PASSWORD)
    assert not answers(server.port, "guess")
    with redis.Redis(port=server.port) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.get("key")


def test_the_password_is_in_a_private_file_and_not_in_the_arguments(
    server: RedisServer, tmp_path: Path
) -> None:
    conf = tmp_path / "redis" / "redis.conf"

    assert PASSWORD in conf.read_text()
    assert stat.S_IMODE(conf.stat().st_mode) == 0o600
    assert stat.S_IMODE(conf.parent.stat().st_mode) == 0o700
    assert PASSWORD not in " ".join(psutil.Process(server.process.pid).cmdline())
    assert PASSWORD not in repr(server)


def test_it_listens_on_loopback_only(server: RedisServer) -> None:
    listening = psutil.Process(server.process.pid).net_connections()

    assert {connection.laddr.ip for connection in listening if connection.status == "LISTEN"} == {"127.0.0.1"}


def test_it_keeps_the_marker_by_which_leftovers_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis writes its title over its environment unless told not to."""
    monkeypatch.setenv(MARKER, "marker-of-this-test")
    running = start_redis(tmp_path / "redis", PASSWORD, tmp_path / "redis.log")

    found = [process.pid for process in marked("marker-of-this-test")]

    running.stop()
    assert found == [running.process.pid]


def test_it_never_evicts(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_restart_keeps_what_was_written(server: RedisServer, tmp_path: Path) -> None:
    with redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
    server.stop()
    server.stop()

    again = start_redis(tmp_path / "redis", PASSWORD, tmp_path / "redis.log")
    try:
        with redis.Redis.from_url(again.url) as client:
            assert client.get("key") == b"value"
    finally:
        again.stop()


def test_data_that_cannot_be_read_ends_in_an_error_with_the_last_words(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "appendonly.aof").write_bytes(b"this is no append-only file\r\n")

    with pytest.raises(RedisError, match="Bad file format"):
        start_redis(tmp_path / "redis", PASSWORD, tmp_path / "redis.log")


def test_it_ends_with_the_process_that_started_it_however_that_ends(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from deploy.redis_server import start_redis\n"
        f"root = Path({str(tmp_path)!r})\n"
        f"print(start_redis(root / 'redis', {PASSWORD!r}, root / 'log').process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

        _, alive = psutil.wait_procs([orphan], timeout=10)

    assert alive == []
