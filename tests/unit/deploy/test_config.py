from pathlib import Path

import httpx
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import SystemConfig, cache_dir, default_state_dir, parse
from deploy.yaml_file import ConfigError

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
    with pytest.raises(ConfigError, match="port: "):
        parse({"port": port}, source="x.yaml")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"limits": {"max_body_bytes": 0}}, r"limits\.max_body_bytes: .* 1"),
        ({"limits": {"request_timeout_s": -1}}, r"limits\.request_timeout_s: .* 0"),
        ({"limits": {"silence_s": 1}}, r"limits\.silence_s: .* 3"),
        (
            {"redis": {"state_url": "http://localhost"}},
            "state_url must be an address that starts with redis://",
        ),
        ({"redis": {"state_url": "redis://h:port"}}, "state_url must be an address"),
        ({"testing": {"drop_bus_frame": 0}}, r"testing\.drop_bus_frame: .* 1"),
        ({"host": ""}, "host must be an address"),
        ({"port": 9000, "dashboard": {"host": "127.0.0.1", "port": 9000}}, "dashboard.port must be another"),
        ({"dashboard": {"host": "127.0.0.1", "port": 8601}}, "dashboard.port must be another"),
        ([1, 2], "configuration"),
        ("text", "configuration"),
    ],
)
def test_a_bad_value_is_named(raw: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(raw, source="x.yaml")


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:8600"), ("::1", "http://[::1]:8600"), ("::", "http://[::]:8600")],
)
def test_a_host_of_either_family_makes_a_url_that_clients_can_use(host: str, url: str) -> None:
    made = httpx.URL(f"http://{SystemConfig(host=host).authority}")

    assert (str(made), made.host, made.port) == (url, host, 8600)


def test_the_password_in_a_redis_url_is_not_shown() -> None:
    config = parse({"redis": {"state_url": "redis://:hunter2@localhost"}}, source="x.yaml")

    assert "hunter2" not in repr(config)


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
