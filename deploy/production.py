"""What mode `production` refuses. Pure: a configuration in, mistakes out, each with its remedy.

Everything here is fit for trying things out and unfit for other people's requests.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from deploy.config import SystemConfig, TestingConfig, leaves
from deploy.yaml_file import Mistake

SHORTEST_SECRET: Final = 16
FEWEST_CHARACTERS: Final = 6
"""Different ones in a secret: below that it is a pattern, not a secret."""
KNOWN_WORDS: Final = (
    "password",
    "changeme",
    "secret",
    "default",
    "foobared",
    "phasegate",
    "123456",
    "qwerty",
)

_IN_PRODUCTION: Final = "refused in mode production"


def refusals(config: SystemConfig) -> Iterator[Mistake]:
    """Every setting that mode `production` refuses; none in another mode."""
    if config.mode != "production":
        return
    usual = {key: value for key, value, _ in leaves(TestingConfig())}
    for key, value, _ in leaves(config.testing):
        if value != usual[key]:
            yield Mistake(
                f"testing.{key}",
                f"a fault made on purpose is {_IN_PRODUCTION}: remove the key, or set mode: dev",
            )
    if not is_loopback(config.host) and not config.expose:
        yield Mistake(
            "host",
            f"{config.host} can be reached from other machines, in clear text: {_IN_PRODUCTION} unless you "
            "say that it is meant with expose: true (behind a proxy that ends TLS), or use 127.0.0.1",
        )
    if config.dashboard.host is not None and not is_loopback(config.dashboard.host):
        yield Mistake(
            "dashboard.host",
            f"an open dashboard is {_IN_PRODUCTION}: use 127.0.0.1, or null for no dashboard",
        )
    yield from _redis_refusals(config.redis.state_url)


def profile_refusals(config: SystemConfig, name: str, profile: object) -> Iterator[Mistake]:
    """What is refused of the model profile of that name, given as read from YAML."""
    if config.mode != "production" or not isinstance(profile, Mapping):
        return
    if profile.get("integrity") is False:
        yield Mistake(
            "profile",
            f"{name} serves without page checks: {_IN_PRODUCTION}; remove integrity: off from it",
        )
    if profile.get("engine") == "scripted":
        yield Mistake(
            "profile",
            f"{name} answers from a script, not from a model: {_IN_PRODUCTION}; choose a profile "
            "with engine: vllm",
        )


def secret_refusals(config: SystemConfig, secrets: Mapping[str, str], file: str) -> Iterator[Mistake]:
    """Weak ones among the state folder's own secrets."""
    if config.mode != "production":
        return
    for name, value in secrets.items():
        if why := weakness(value):
            yield Mistake(
                f"{file}: {name}",
                f"{why}: {_IN_PRODUCTION}; move the file away and a strong one is made (keys made before "
                "are void then)",
            )


def weakness(secret: str) -> str | None:
    """Why a secret can be guessed; None: it looks strong. Never repeats it."""
    if len(secret) < SHORTEST_SECRET:
        return f"shorter than {SHORTEST_SECRET} characters"
    if len(set(secret)) < FEWEST_CHARACTERS:
        return f"has fewer than {FEWEST_CHARACTERS} different characters"
    if any(word in secret.lower() for word in KNOWN_WORDS):
        return "holds a word that everybody tries"
    return None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _redis_refusals(url: str | None) -> Iterator[Mistake]:
    if url is None:
        return
    parts = urlsplit(url)
    if parts.scheme == "unix":  # the file system says who may connect
        return
    asked = parse_qs(parts.query).get("password", [""])[0]
    password = asked or unquote(parts.password or "")
    why = weakness(password) if password else "names no password"
    if why:
        yield Mistake(
            "redis.state_url",
            f"{why if not password else f'its password is weak ({why})'}: {_IN_PRODUCTION}; give Redis a "
            "random password of at least 32 characters (requirepass or an ACL user)",
        )
