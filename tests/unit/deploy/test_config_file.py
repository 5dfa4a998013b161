from pathlib import Path

import pytest
import yaml

from deploy.config import PORT_DEFAULT, SystemConfig
from deploy.config_file import gather, load, show
from deploy.yaml_file import ConfigError


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "system.yaml"
    file.write_text(text)
    return file


def test_the_command_line_stands_above_the_file_and_the_file_above_the_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 9000\nprofile: exact\n")

    assert load(file, port=9001) == SystemConfig(port=9001, profile="exact")
    assert load(file) == SystemConfig(port=9000, profile="exact")
    assert load(None).port == PORT_DEFAULT


def test_a_bad_port_on_the_command_line_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match=r"port: .*65535 \(command line\)"):
        load(None, port=70_000)


def test_every_kind_of_mistake_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    """A key given twice, an unknown key, bad values, several in one section, refusals of production."""
    file = written(
        tmp_path,
        "mode: production\nhost: 0.0.0.0\nport: many\nport: 8600.5\n"
        "limits: {max_body_bytes: 0, max_in_flight: -1, request_timeout_s: .nan, silence_s: 1}\n"
        "testing:\n  drop_bus_frame: 1\ncolour: red\nredis: {state_url: 'http://:hunter2@x'}\n",
    )

    with pytest.raises(ConfigError) as refused:
        load(file)

    said = [line.strip() for line in str(refused.value).splitlines()]
    assert said[0] == f"{file}:"
    assert [line.split(":")[0] for line in said[1:]] == [
        *("port", "port", "redis", "limits.max_body_bytes", "limits.max_in_flight"),
        *("limits.request_timeout_s", "limits.silence_s", "colour", "testing.drop_bus_frame", "host"),
    ]
    assert "given twice, in lines 3 and 4" in said[1]
    assert said[2].endswith("(line 3)")
    assert said[-3].endswith("(line 8)")
    assert "hunter2" not in str(refused.value)


def test_bad_keys_do_not_keep_the_others_from_being_read(tmp_path: Path) -> None:
    found = gather(
        written(tmp_path, "port: many\nhost: 10.0.0.1\nlimits: {max_in_flight: x, silence_s: 5}\n")
    )

    assert (found.config.host, found.config.limits.silence_s, found.config.port) == (
        "10.0.0.1",
        5,
        PORT_DEFAULT,
    )
    assert found.doubtful == {"port", "limits"}


@pytest.mark.parametrize("text", ["[1, 2]", "text", "3"])
def test_a_file_that_is_no_mapping_is_one_mistake(tmp_path: Path, text: str) -> None:
    assert [mistake.key for mistake in gather(written(tmp_path, text)).mistakes] == ["configuration"]


def test_show_tells_every_value_with_its_origin_and_is_yaml_again(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 9000\nlimits:\n  silence_s: 7\n")

    text = show(gather(file, profile="exact"))

    rows = {line.split(":")[0]: line.rpartition("# ")[2] for line in text.splitlines() if "#" in line}
    assert rows["port"] == f"{file}:1"
    assert rows["  silence_s"] == f"{file}:3"
    assert rows["profile"] == "command line"
    assert rows["host"] == "default"
    shown = written(tmp_path, text)
    assert load(shown) == load(written(tmp_path, "port: 9000\nlimits:\n  silence_s: 7\n"), profile="exact")


def test_show_hides_the_password_and_keeps_the_place(tmp_path: Path) -> None:
    for url in (
        "redis://user:hunter2@db.internal:6380/2",
        "redis://:hunter2@[::1]:6380/2",
        "redis://db.internal/0?password=hunter2",
        "unix://:hunter2@/run/redis.sock?db=1",
    ):
        text = show(gather(written(tmp_path, yaml.safe_dump({"redis": {"state_url": url}}))))

        assert "hunter2" not in text
        assert "state_url" in text
        assert any(place in text for place in ("db.internal", "[::1]:6380", "/run/redis.sock"))
