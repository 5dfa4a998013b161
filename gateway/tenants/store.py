"""Accounts and keys in Redis, role `state`.

    pg:account:{id}      Account
    pg:accounts          set of account ids
    pg:key:{digest}      KeyRecord
    pg:key-digest:{id}   digest, to find the record of a key id
    pg:account-keys:{account}   set of key ids

Every look-up asks Redis: a revoked key stops working with the next request.
"""

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Final, Self

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.errors import RETRY_AFTER_S, StateUnavailable
from gateway.tenants import keys
from gateway.tenants.model import Account, KeyRecord, Tenant

TIMEOUT_S: Final = 2.0
"""Of one exchange with Redis. A store that is slower than this is not usable for a look-up per request."""
CONNECTIONS: Final = 32
"""To Redis, at most. A look-up holds one for less than a millisecond."""
TURN_S: Final = 10.0
"""Longest that a look-up waits for one of them: every exchange before it ends in time."""


def wall_clock() -> float:
    """Unix seconds: expiry dates are calendar time."""
    return datetime.now(UTC).timestamp()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


class UnknownAccount(LookupError):
    """No account has this id."""


class TenantStore:
    """All methods raise `StateUnavailable` when Redis cannot be reached in time."""

    def __init__(self, redis: Redis, pepper: bytes, now: Callable[[], float] = wall_clock) -> None:
        self._redis = redis
        self._pepper = pepper
        self._now = now

    @classmethod
    def open(cls, url: str, pepper: bytes) -> Self:
        """Connects lazily."""
        pool = BlockingConnectionPool.from_url(
            url,
            # The usual pool fails whoever finds it empty: a burst of requests waits its turn here.
            max_connections=CONNECTIONS,
            timeout=TURN_S,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # one reconnect: a server that was restarted left dead sockets
        )
        return cls(Redis.from_pool(pool), pepper)

    async def close(self) -> None:
        await self._redis.aclose()

    async def create_account(self, name: str) -> Account:
        account = Account(id=secrets.token_hex(16), name=name, cache_salt=secrets.token_hex(32))
        async with self._exchange() as redis, redis.pipeline(transaction=True) as batch:
            batch.set(f"pg:account:{account.id}", msgspec.json.encode(account))
            batch.sadd("pg:accounts", account.id)
            await batch.execute()
        return account

    async def accounts(self) -> list[Account]:
        """All accounts, by name."""
        async with self._exchange() as redis:
            ids = sorted(map(_text, await redis.smembers("pg:accounts")))
            raw = await redis.mget([f"pg:account:{account_id}" for account_id in ids]) if ids else []
        found = (msgspec.json.decode(one, type=Account) for one in raw if one is not None)
        return sorted(found, key=lambda account: (account.name, account.id))

    async def create_key(
        self, account_id: str, models: tuple[str, ...] = (), expires_at: float | None = None
    ) -> tuple[str, KeyRecord]:
        """The new key, which cannot be shown again, and its record.

        Raises:
            UnknownAccount: there is no such account.
        """
        key = keys.mint()
        record = KeyRecord(
            id=f"key_{secrets.token_hex(8)}",
            account_id=account_id,
            models=models,
            created_at=self._now(),
            expires_at=expires_at,
        )
        digest = keys.digest(key, self._pepper)
        async with self._exchange() as redis:
            if not await redis.exists(f"pg:account:{account_id}"):
                raise UnknownAccount(account_id)
            async with redis.pipeline(transaction=True) as batch:
                batch.set(f"pg:key:{digest}", msgspec.json.encode(record))
                batch.set(f"pg:key-digest:{record.id}", digest)
                batch.sadd(f"pg:account-keys:{account_id}", record.id)
                await batch.execute()
        return key, record

    async def resolve(self, key: str) -> Tenant | None:
        """Whose key this is; None when it is unknown, revoked, expired or not a key at all."""
        if not keys.well_formed(key):
            return None
        async with self._exchange() as redis:
            raw_key = await redis.get(f"pg:key:{keys.digest(key, self._pepper)}")
            if raw_key is None:
                return None
            record = msgspec.json.decode(raw_key, type=KeyRecord)
            raw_account = await redis.get(f"pg:account:{record.account_id}")
        if raw_account is None or record.expired(self._now()):
            return None
        return Tenant(account=msgspec.json.decode(raw_account, type=Account), key=record)

    async def keys_of(self, account_id: str) -> list[KeyRecord]:
        """The account's keys, oldest first."""
        async with self._exchange() as redis:
            ids = sorted(map(_text, await redis.smembers(f"pg:account-keys:{account_id}")))
            digests = await redis.mget([f"pg:key-digest:{key_id}" for key_id in ids]) if ids else []
            names = [f"pg:key:{_text(digest)}" for digest in digests if digest is not None]
            raw = await redis.mget(names) if names else []
        records = (msgspec.json.decode(one, type=KeyRecord) for one in raw if one is not None)
        return sorted(records, key=lambda record: (record.created_at, record.id))

    async def revoke(self, key_id: str) -> bool:
        """Afterwards the key opens nothing. False: there is no such key."""
        async with self._exchange() as redis:
            digest = await redis.get(f"pg:key-digest:{key_id}")
            raw = None if digest is None else await redis.get(f"pg:key:{_text(digest)}")
            if digest is None or raw is None:
                return False
            record = msgspec.json.decode(raw, type=KeyRecord)
            async with redis.pipeline(transaction=True) as batch:
                batch.delete(f"pg:key:{_text(digest)}", f"pg:key-digest:{key_id}")
                batch.srem(f"pg:account-keys:{record.account_id}", key_id)
                await batch.execute()
        return True

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[Redis]:
        try:
            yield self._redis
        except (RedisError, OSError) as error:
            raise StateUnavailable(retry_after_s=RETRY_AFTER_S) from error
