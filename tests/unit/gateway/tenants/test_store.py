"""Keys and accounts, against a real Redis server."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from gateway.errors import StateUnavailable
from gateway.tenants.keys import digest, mint, well_formed
from gateway.tenants.store import CONNECTIONS, TenantStore, UnknownAccount
from tests.support.redis_server import running_redis

PEPPER = b"p" * 32


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running_redis() as url:
        yield url


@pytest.fixture
async def store(url: str) -> AsyncIterator[TenantStore]:
    with redis.Redis.from_url(url) as client:
        client.flushall()
    store = TenantStore.open(url, PEPPER)
    yield store
    await store.close()


async def test_new_key_opens_its_account_and_no_other(store: TenantStore) -> None:
    first, second = await store.create_account("first"), await store.create_account("second")
    key, record = await store.create_key(second.id, models=("m",))

    tenant = await store.resolve(key)

    assert tenant
    assert (tenant.account, tenant.key) == (second, record)
    assert (tenant.may_use("m"), tenant.may_use("other")) == (True, False)
    assert first.cache_salt != second.cache_salt
    assert await store.accounts() == [first, second]


async def test_revoked_key_opens_nothing_with_the_next_look_up(store: TenantStore) -> None:
    account = await store.create_account("a")
    key, record = await store.create_key(account.id)
    assert await store.resolve(key)

    assert await store.revoke(record.id)
    assert await store.resolve(key) is None
    assert await store.keys_of(account.id) == []
    assert not await store.revoke(record.id)


async def test_key_opens_until_it_expires(store: TenantStore, url: str) -> None:
    account = await store.create_account("a")
    key, record = await store.create_key(account.id, expires_at=2_000_000_000.0)
    at = {"now": 1_999_999_999.0}
    client = redis.asyncio.Redis.from_url(url)
    timed = TenantStore(client, PEPPER, now=lambda: at["now"])

    before = await timed.resolve(key)
    at["now"] = 2_000_000_000.0
    after = await timed.resolve(key)
    await timed.close()

    assert before
    assert (before.key, after) == (record, None)


async def test_store_holds_no_key_and_its_digests_need_the_pepper(store: TenantStore, url: str) -> None:
    account = await store.create_account("a")
    key, _ = await store.create_key(account.id)
    with redis.Redis.from_url(url) as client:
        stored = b"".join(
            name + (client.get(name) or b"" if client.type(name) == b"string" else b"")
            for name in client.scan_iter()
        )
    other = TenantStore.open(url, b"q" * 32)
    tenant = await other.resolve(key)
    await other.close()

    assert key.encode() not in stored
    assert tenant is None


@pytest.mark.parametrize("key", ["", "pg_", "pg_" + "x" * 42, "pg_" + "x" * 43 + "\n", "pg_" + "é" * 43])
async def test_what_is_no_key_opens_nothing(store: TenantStore, key: str) -> None:
    assert await store.resolve(key) is None


async def test_key_needs_an_account(store: TenantStore) -> None:
    with pytest.raises(UnknownAccount):
        await store.create_key("0" * 32)


async def test_a_burst_of_requests_waits_its_turn_at_the_store(store: TenantStore, url: str) -> None:
    account = await store.create_account("a")
    key, _ = await store.create_key(account.id)

    found = await asyncio.gather(*(store.resolve(key) for _ in range(150)))

    assert {tenant.account.id for tenant in found if tenant} == {account.id}
    assert None not in found
    with redis.Redis.from_url(url) as client:
        assert len(client.client_list()) <= CONNECTIONS + 1


async def test_look_ups_that_are_cut_off_never_give_one_tenant_anothers_answer(store: TenantStore) -> None:
    """A client that leaves cancels its look-up, whose answer may still be on the connection."""
    accounts = [await store.create_account(name) for name in "ab"]
    keys = [(account.id, (await store.create_key(account.id))[0]) for account in accounts]
    rng = random.Random(1)

    async def look(account_id: str, key: str) -> None:
        tenant = await store.resolve(key)
        assert tenant is not None
        assert tenant.account.id == account_id

    async def cut(account_id: str, key: str) -> None:
        task = asyncio.create_task(look(account_id, key))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None

    for _ in range(50):
        work = (rng.choice((look, cut))(*rng.choice(keys)) for _ in range(8))
        await asyncio.gather(*work)


async def test_unreachable_store_is_a_typed_error() -> None:
    store = TenantStore.open("unix:///nonexistent/socket", PEPPER)

    with pytest.raises(StateUnavailable):
        await store.resolve(mint())
    await store.close()


def test_minted_keys_are_well_formed_and_differ() -> None:
    minted = {mint() for _ in range(100)}

    assert len(minted) == 100
    assert all(map(well_formed, minted))


def test_digest_depends_on_key_and_pepper() -> None:
    assert len({digest("a", b"x"), digest("b", b"x"), digest("a", b"y")}) == 3
