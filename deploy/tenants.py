"""Accounts and keys from the command line: the gateway's store, opened on the running system's Redis."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from deploy.state import StateDir, read_private, write_private

T = TypeVar("T")
FIRST_ACCOUNT: Final = "default"
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TenantError(Exception):
    """The command cannot be carried out. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The account of the state folder's owner, made at the first start."""

    account_id: str
    api_key: str = field(repr=False)


def with_store(state_url: str, pepper: str, act: Callable[[Any], Awaitable[T]]) -> T:
    """Runs `act` on a `TenantStore` that is closed afterwards.

    Raises:
        TenantError: Redis does not answer.
    """
    from gateway.errors import StateUnavailable
    from gateway.tenants.store import TenantStore

    async def run() -> T:
        store = TenantStore.open(state_url, bytes.fromhex(pepper))
        try:
            return await act(store)
        finally:
            await store.close()

    try:
        return asyncio.run(run())
    except StateUnavailable as bad:
        raise TenantError(_why(bad.__cause__)) from None


def _why(error: BaseException | None) -> str:
    """A server that is there and refuses, as one on a full disk does, says why."""
    from redis.exceptions import ResponseError

    return f"Redis refuses: {error}" if isinstance(error, ResponseError) else "Redis does not answer"


def with_running_store(state: StateDir, act: Callable[[Any], Awaitable[T]]) -> T:
    """The same for the system that runs in a state folder.

    Raises:
        TenantError: none runs there, or Redis does not answer.
    """
    if not state.gateway_secrets.exists():
        raise TenantError(f"nothing runs with state folder {state.root}: start it with `phasegate up`")
    raw = read_private(state.gateway_secrets)
    return with_store(raw["state_url"], raw["pepper"], act)


def first_key(state_url: str, pepper: str, state: StateDir) -> Owner:
    """The owner's account and key. The key is kept in a private file, and made anew if Redis lost it."""
    file = state.root / "owner.json"

    async def act(store: Any) -> Owner:
        if file.exists():
            raw = read_private(file)
            known = await store.resolve(raw.get("api_key", ""))
            if known is not None:
                return Owner(account_id=known.account.id, api_key=raw["api_key"])
        account_id = await account(store, FIRST_ACCOUNT)
        key, _ = await store.create_key(account_id)
        write_private(file, {"account_id": account_id, "api_key": key})
        return Owner(account_id=account_id, api_key=key)

    return with_store(state_url, pepper, act)


async def account(store: Any, name_or_id: str) -> str:
    """Id of the account with this id or name; one with this name is made if there is none."""
    for known in await store.accounts():
        if name_or_id in (known.id, known.name):
            return str(known.id)
    made = await store.create_account(name_or_id)
    return str(made.id)


def expiry(text: str, now: datetime) -> float:
    """Unix seconds of `30d`, `12h`, `90m`, `45s` from now, or of an ISO date.

    Raises:
        TenantError: it is neither, or it is past.
    """
    try:
        if text and text[-1] in UNITS:
            at = now + timedelta(seconds=int(text[:-1]) * UNITS[text[-1]])
        else:
            at = datetime.fromisoformat(text)
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise TenantError(f"--expires: {text!r} is neither a time like 30d or 12h nor a date") from None
    if at <= now:
        raise TenantError(f"--expires: {text!r} is in the past")
    return at.timestamp()
