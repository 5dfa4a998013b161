from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from deploy.state import StateDir, open_state
from deploy.tenants import UNITS, TenantError, expiry, first_key, with_running_store, with_store
from tests.support.redis_server import running_redis

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PEPPER = "ab" * 32


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return open_state(tmp_path)


@pytest.fixture
def redis_url() -> Iterator[str]:
    with running_redis() as url:
        yield url


@given(number=st.integers(1, 10_000), unit=st.sampled_from(sorted(UNITS)))
def test_a_time_from_now_is_counted_in_its_unit(number: int, unit: str) -> None:
    assert expiry(f"{number}{unit}", NOW) == NOW.timestamp() + number * UNITS[unit]


def test_a_date_without_a_zone_is_utc() -> None:
    assert expiry("2026-03-01", NOW) == datetime(2026, 3, 1, tzinfo=UTC).timestamp()
    assert expiry("2026-03-01T00:00+02:00", NOW) == datetime(2026, 2, 28, 22, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("text", ["", "d", "soon", "1.5d", "12 parsecs", f"{10**12}d"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(TenantError, match="neither a time"):
        expiry(text, NOW)


@pytest.mark.parametrize("text", ["0d", "-1h", (NOW - timedelta(days=1)).isoformat()])
def test_the_past_is_refused(text: str) -> None:
    with pytest.raises(TenantError, match="in the past"):
        expiry(text, NOW)


def test_the_owner_s_key_is_made_once_and_kept_private(state: StateDir, redis_url: str) -> None:
    owner = first_key(redis_url, PEPPER, state)

    assert first_key(redis_url, PEPPER, state) == owner
    assert (state.root / "owner.json").stat().st_mode & 0o077 == 0
    assert owner.api_key not in repr(owner)


def test_the_owner_gets_a_new_key_where_the_old_one_is_void(state: StateDir, redis_url: str) -> None:
    owner = first_key(redis_url, PEPPER, state)

    renewed = first_key(redis_url, "cd" * 32, state)

    assert renewed.account_id == owner.account_id
    assert renewed.api_key != owner.api_key


def test_a_dead_redis_is_told(tmp_path: Path) -> None:
    async def act(store: object) -> object:
        return await store.accounts()  # type: ignore[attr-defined]

    with pytest.raises(TenantError, match="Redis does not answer"):
        with_store(f"unix://{tmp_path}/nobody", PEPPER, act)


def test_a_redis_that_refuses_to_write_says_why(redis_url: str) -> None:
    """As it does when its disk is full."""
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("min-replicas-to-write", 1)

    async def act(store: object) -> object:
        return await store.create_account("a")  # type: ignore[attr-defined]

    with pytest.raises(TenantError, match=r"Redis refuses: .*[Nn]ot enough good replicas"):
        with_store(redis_url, PEPPER, act)


def test_without_a_running_system_there_is_no_store_to_open(state: StateDir) -> None:
    async def act(store: object) -> None:
        raise AssertionError("opened")

    with pytest.raises(TenantError, match="nothing runs"):
        with_running_store(state, act)
