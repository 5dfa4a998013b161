"""Accounts, keys, and what a key may do. Pure."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    id: str
    """32 hex digits."""
    name: str
    cache_salt: str = field(repr=False)
    """256 random bits in hex. It goes into every page hash: no other tenant can hit this one's pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """What is stored of an API key: never the key."""

    id: str
    """Stable and public: names the key in lists and logs."""
    account_id: str
    models: tuple[str, ...] = ()
    """Allowed model ids; empty: all of them."""
    created_at: float
    """Unix seconds."""
    expires_at: float | None = None

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who is asking: the account, by which key."""

    account: Account
    key: KeyRecord

    def may_use(self, model_id: str) -> bool:
        return not self.key.models or model_id in self.key.models


def combined_salt(tenant_salt: str, client_salt: str | None) -> str:
    """The salt of one request. A client's own salt divides its tenant's cache; it never leaves it."""
    return tenant_salt if client_salt is None else f"{tenant_salt}/{client_salt}"
