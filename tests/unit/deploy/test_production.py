from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.config import SystemConfig, parse
from deploy.production import (
    is_loopback,
    profile_refusals,
    refusals,
    secret_refusals,
    weakness,
)

STRONG = "9f8e7d6c5b4a39281706f5e4d3c2b1a0"


def config(mode: str = "production", **changes: Any) -> SystemConfig:
    return parse({"mode": mode, **changes}, source="x.yaml")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("testing.drop_bus_frame", {"testing": {"drop_bus_frame": 1}}, "remove the key"),
    ("testing.page_faults", {"testing": {"page_faults": "/faults"}}, "remove the key"),
    ("host", {"host": "0.0.0.0"}, "expose: true"),
    ("host", {"host": "::"}, "expose: true"),
    ("host", {"host": "gateway.internal"}, "127.0.0.1"),
    ("dashboard.host", {"dashboard": {"host": "0.0.0.0"}}, "127.0.0.1"),
    ("redis.state_url", {"redis": {"state_url": "redis://localhost"}}, "random password"),
    ("redis.state_url", {"redis": {"state_url": "redis://:foobared@localhost"}}, "random password"),
    (
        "redis.state_url",
        {"redis": {"state_url": f"redis://:{STRONG}@localhost?password=short"}},
        "random password",
    ),
]


@pytest.mark.parametrize(("key", "setting", "remedy"), REFUSED)
def test_production_refuses_naming_key_and_remedy_and_dev_takes_it(
    key: str, setting: dict[str, Any], remedy: str
) -> None:
    (refused,) = refusals(config(**setting))

    assert refused.key == key
    assert "refused in mode production" in refused.text
    assert remedy in refused.text
    assert list(refusals(config("dev", **setting))) == []


def test_all_refusals_come_at_once() -> None:
    everything: dict[str, Any] = {}
    for _, setting, _ in REFUSED:
        for section, value in setting.items():
            more = isinstance(value, dict)
            everything[section] = everything.get(section, {}) | value if more else value

    assert {mistake.key for mistake in refusals(config(**everything))} == {key for key, _, _ in REFUSED}


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"host": "0.0.0.0", "expose": True},
        {"host": "::1"},
        {"dashboard": {"host": "127.0.0.1"}},
        {"redis": {"state_url": f"rediss://user:{STRONG}@redis.internal:6380/0"}},
        {"redis": {"state_url": f"redis://redis.internal?password={STRONG}"}},
        {"redis": {"state_url": "unix:///run/redis.sock"}},
    ],
)
def test_what_is_fit_for_production_is_taken(setting: dict[str, Any]) -> None:
    assert list(refusals(config(**setting))) == []


def test_a_scripted_engine_is_refused_in_production_only() -> None:
    (refused,) = profile_refusals(config(), "own", {"engine": "scripted"})

    assert refused.key == "profile"
    assert "engine: vllm" in refused.text
    assert list(profile_refusals(config("dev"), "own", {"engine": "scripted"})) == []
    assert list(profile_refusals(config(), "own", {"engine": "vllm"})) == []
    assert list(profile_refusals(config(), "own", {})) == []
    assert list(profile_refusals(config(), "own", None)) == []


def test_unchecked_pages_are_refused_in_production_only() -> None:
    (refused,) = profile_refusals(config(), "own", {"integrity": False})

    assert refused.key == "profile"
    assert "integrity: off" in refused.text
    assert list(profile_refusals(config("dev"), "own", {"integrity": False})) == []
    assert list(profile_refusals(config(), "own", {"integrity": True})) == []


def test_weak_secrets_of_the_state_folder_are_refused_in_production_only() -> None:
    secrets = {"redis_password": "changeme" * 4, "pepper": STRONG}

    (refused,) = secret_refusals(config(), secrets, "/s/secrets.json")

    assert refused.key == "/s/secrets.json: redis_password"
    assert "move the file away" in refused.text
    assert list(secret_refusals(config("dev"), secrets, "/s/secrets.json")) == []


@pytest.mark.parametrize("secret", ["", "hunter2", "a" * 64, "0101" * 16, "my-Password-is-very-long-indeed"])
def test_a_weak_secret_is_told_why_and_never_repeated(secret: str) -> None:
    why = weakness(secret)

    assert why is not None
    assert not secret or secret not in why


@given(st.binary(min_size=32, max_size=32).filter(lambda raw: len(set(raw.hex())) >= 6))
def test_random_secrets_of_our_own_kind_are_strong(raw: bytes) -> None:
    secret = raw.hex()

    assert weakness(secret) is None or "123456" in secret


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback_is_told_from_what_others_reach(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here
