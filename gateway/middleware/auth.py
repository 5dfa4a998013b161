"""No key, no answer: everything but the health routes needs one."""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import ApiError, InvalidApiKey
from gateway.rest.problem import problem
from gateway.tenants.model import Tenant

OPEN_PATHS: Final = frozenset({"/healthz", "/readyz"})


class Auth:
    """Puts the tenant at `scope["state"]["tenant"]`, or answers 401."""

    def __init__(self, app: ASGIApp, resolve: Callable[[str], Awaitable[Tenant | None]]) -> None:
        self.app = app
        self._resolve = resolve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                tenant = await self._resolve(_key(Headers(scope=scope)))
                if tenant is None:
                    raise InvalidApiKey
            except ApiError as error:
                scope["state"]["facts"].update(error=error.code)
                await problem(error)(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant
            scope["state"]["facts"].update(account=tenant.account.id, key=tenant.key.id)
        await self.app(scope, receive, send)


def _key(headers: Headers) -> str:
    """The key as given; empty when there is none. A bearer token goes before `x-api-key`."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
