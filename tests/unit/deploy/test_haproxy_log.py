import logging
import stat
from pathlib import Path

import httpx
import pytest

from deploy.config import SystemConfig
from deploy.haproxy_log import LINES_PER_S, HaproxyLog
from deploy.ingress import LOG_SOCKET
from deploy.redis_server import free_port
from tests.support.haproxy import running_haproxy
from tests.support.stack import eventually


async def test_an_answer_of_haproxy_leaves_a_line_with_its_id_and_a_gateways_leaves_none(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    log = HaproxyLog(tmp_path / LOG_SOCKET, lines.append)
    log.start()
    assert stat.S_IMODE((tmp_path / LOG_SOCKET).stat().st_mode) == 0o600
    async with (
        running_haproxy(SystemConfig(port=free_port()), tmp_path, free_port()) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        answer = await client.get("/v1/models?secret=1", headers={"authorization": "Bearer hidden"})
        fine = await client.get("/-/routes")
    (line,) = eventually(lambda: [line for line in lines if "status=503" in line], bool)
    log.close()

    assert f"request_id={answer.headers['x-request-id']}" in line
    assert fine.headers["x-request-id"] not in "".join(lines)
    assert not [word for word in ("secret", "hidden", "models") if word in "".join(lines)]


def test_a_flood_is_counted_and_not_kept(tmp_path: Path) -> None:
    lines: list[str] = []
    at = [0.0]
    log = HaproxyLog(tmp_path / "log.sock", lines.append, lambda: at[0])

    for _ in range(10 * LINES_PER_S):
        log.take("bad request")
    at[0] = 1.0
    log.take("one more")
    log.close()

    assert len(lines) == LINES_PER_S + 2
    assert lines[-2:] == [f"haproxy.log.dropped lines={9 * LINES_PER_S}", "one more"]


@pytest.mark.parametrize(
    ("line", "level"),
    [
        (
            "<149>Dec  1 04:00:00 haproxy[7]: Proxy clients stopped (cumulated conns: FE: 3, BE: 0).",
            logging.DEBUG,
        ),
        ("<150>Dec  1 04:00:00 haproxy[7]: status=503 request_id=stopped", logging.WARNING),
    ],
)
def test_proxies_that_end_at_a_reload_are_no_warning(
    tmp_path: Path, line: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    log = HaproxyLog(tmp_path / "log.sock")
    with caplog.at_level(logging.DEBUG, logger="deploy.haproxy_log"):
        log.take(line)
    log.close()

    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]
