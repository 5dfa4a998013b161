"""Making API keys, and the digest under which they are stored."""

import hashlib
import hmac
import re
import secrets
from typing import Final

PREFIX: Final = "pg_"
_FORM: Final = re.compile(r"pg_[A-Za-z0-9_-]{43}")


def mint() -> str:
    """A new key: 256 random bits. Shown once, stored nowhere."""
    return PREFIX + secrets.token_urlsafe(32)


def well_formed(key: str) -> bool:
    return _FORM.fullmatch(key) is not None


def digest(key: str, pepper: bytes) -> str:
    """HMAC-SHA-256 in hex. Without the pepper, which is not in the store, a stolen store tests no guess."""
    return hmac.new(pepper, key.encode(), hashlib.sha256).hexdigest()
