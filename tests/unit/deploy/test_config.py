from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import (
    PORT_DEFAULT,
    ConfigError,
    SystemConfig,
    cache_dir,
    default_state_dir,
    load,
    parse,
    read_yaml,
)

SECTIONS = ("redis", "limits", "testing")


def test_an_empty_file_means_the_defaults() -> None:
    assert parse(None, source="x.yaml") == SystemConfig()


def test_every_mistake_is_reported_at_once_with_its_path() -> None:
    raw = {"port": "8600", "mode": "prod", "limits": {"max_in_flight": "many"}, "colour": "red"}

    with pytest.raises(ConfigError) as refused:
        parse(raw, source="system.yaml")

    lines = str(refused.value).splitlines()
    assert lines[0] == "system.yaml:"
    assert {line.strip().split(":")[0] for line in lines[1:]} == {
        *("port", "mode", "limits.max_in_flight", "colour")
    }


@given(
    section=st.sampled_from(SECTIONS),
    key=st.text("abcdefghijklmnopqrstuvwxyz", min_size=3, max_size=12).map(lambda text: f"no_{text}"),
)
def test_an_unknown_key_is_a_mistake_in_every_section(section: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        parse({section: {key: 1}}, source="x.yaml")


@given(st.integers().filter(lambda port: not 1 <= port <= 65535))
def test_a_port_that_does_not_exist_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="port must be between 1 and 65535"):
        parse({"port": port}, source="x.yaml")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"limits": {"max_body_bytes": 0}}, "max_body_bytes must be positive"),
        ({"limits": {"request_timeout_s": -1}}, "request_timeout_s must be positive"),
        ({"limits": {"silence_s": 1}}, "silence_s must be at least 3"),
        ({"redis": {"state_url": "http://localhost"}}, "state_url must start with redis://"),
        ({"testing": {"drop_bus_frame": 0}}, "drop_bus_frame counts from 1"),
        ([1, 2], "configuration"),
        ("text", "configuration"),
    ],
)
def test_a_bad_value_is_named(raw: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(raw, source="x.yaml")


def test_production_refuses_faults_on_purpose_and_dev_takes_them() -> None:
    faults = {"drop_bus_frame": 2}

    assert parse({"testing": faults}, source="x.yaml").testing.drop_bus_frame == 2
    with pytest.raises(ConfigError, match="refused in mode production"):
        parse({"mode": "production", "testing": faults}, source="x.yaml")


def test_the_password_in_a_redis_url_is_not_shown() -> None:
    config = parse({"redis": {"state_url": "redis://:hunter2@localhost"}}, source="x.yaml")

    assert "hunter2" not in repr(config)


def test_the_command_line_stands_above_the_file_and_the_file_above_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("port: 9000\nprofile: exact\n")

    assert load(file, port=9001) == SystemConfig(port=9001, profile="exact")
    assert load(file) == SystemConfig(port=9000, profile="exact")
    assert load(None).port == PORT_DEFAULT


def test_a_bad_port_on_the_command_line_is_told_as_such() -> None:
    with pytest.raises(ConfigError, match="command line: port"):
        load(None, port=70_000)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: No such file"):
        read_yaml(tmp_path / "absent.yaml")


def test_a_file_that_is_not_yaml_is_told_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "system.yaml"
    file.write_text("port: [8600\nprofile: }")

    with pytest.raises(ConfigError, match="not YAML") as refused:
        read_yaml(file)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("env", "cache", "state"),
    [
        ({"HOME": "/h"}, "/h/.cache/phasegate", "/h/.local/state/phasegate"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/s"}, "/c/phasegate", "/s/phasegate"),
        (
            {"HOME": "/h", "XDG_CACHE_HOME": "/c", "PHASEGATE_CACHE": "/models"},
            "/models",
            "/h/.local/state/phasegate",
        ),
    ],
)
def test_folders_follow_the_environment(env: dict[str, str], cache: str, state: str) -> None:
    assert cache_dir(env) == Path(cache)
    assert default_state_dir(env) == Path(state)


@pytest.mark.parametrize(
    "text",
    ["2020-01-01: x", "limits: &a {max_in_flight: *a}", "limits: {request_timeout_s: .nan}"],
    ids=["date as key", "anchor inside itself", "not a number"],
)
def test_what_yaml_allows_and_a_configuration_cannot_hold_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"phasegate\.yaml"):
        parse(yaml.safe_load(text), source="phasegate.yaml")
