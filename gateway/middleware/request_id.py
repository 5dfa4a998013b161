"""The request's id: minted here, used by engines and logs, returned on every answer.

A client's `x-request-id` is returned as its label and used for nothing else: it is unique to nobody.
Serve's proxy gives every request a label, and adds it to the answer itself.
"""

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LABEL: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """The minted id: 128 random bits in hex."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def label_of(scope: Scope) -> str:
    """What the client, or the proxy, calls the request; the minted id where nobody named it."""
    label: str = scope["state"]["label"]
    return label


def body_send_of(scope: Scope) -> Send:
    """For what follows an answer's start: no middleware looks at it, and a stream has one for each token."""
    send: Send = scope["state"]["body_send"]
    return send


class RequestId:
    def __init__(self, app: ASGIApp, *, proxy_labels: bool) -> None:
        """`proxy_labels`: a proxy in front adds `x-request-id` to answers; ours would be a second one."""
        self.app = app
        self._proxy_labels = proxy_labels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = secrets.token_hex(16)
        # A fresh dictionary: a server may share one between the requests of a connection.
        given = Headers(scope=scope).get("x-request-id", "")
        label = given if LABEL.fullmatch(given) else request_id
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": request_id,
            "label": label,
            "body_send": send,
        }

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if not self._proxy_labels:
                    headers["x-request-id"] = label
                headers["cf-ai-req-id"] = label
            await send(message)

        await self.app(scope, receive, labelled)
