"""Refuses a body that does not arrive in time, however steadily it drips."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import RequestIncomplete


class BodyDeadline:
    """Counts from the first time that somebody asks for the body to its last byte."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self.app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        deadline: float | None = None
        complete = False

        async def timed() -> Message:
            nonlocal deadline, complete
            if complete:  # what comes now is the client's leaving, and that has no deadline
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + self._timeout_s
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise RequestIncomplete from None
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, timed, send)
