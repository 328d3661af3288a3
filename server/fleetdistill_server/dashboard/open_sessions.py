"""The sessions of browsers that have signed in. A cookie names one and is worth nothing once the session has ended."""

from __future__ import annotations

import asyncio
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST = 1000
"""Largest number of open sessions; a further one ends the oldest."""
_DISCONNECT: Message = {"type": "websocket.disconnect", "code": 1001}


class OpenSessions:
    """The open sessions, in memory. Used by one event loop."""

    def __init__(self) -> None:
        self._ended: dict[str, asyncio.Event] = {}

    def begin(self) -> str:
        """Begins a session and returns its name, which cannot be guessed."""
        if len(self._ended) >= _MOST:
            self.end(next(iter(self._ended)))
        name = secrets.token_urlsafe(32)
        self._ended[name] = asyncio.Event()
        return name

    def has(self, name: str) -> bool:
        """Returns whether a session is open."""
        return name in self._ended

    def end(self, name: str) -> None:
        """Ends a session and its websockets; a session that is not open is ignored."""
        ended = self._ended.pop(name, None)
        if ended is not None:
            ended.set()

    async def serve(self, name: str, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the websocket of an open session; the application sees it disconnect when the session ends."""
        ended = self._ended[name]
        ending = asyncio.create_task(ended.wait())

        async def receiving() -> Message:
            message = asyncio.ensure_future(receive())
            await asyncio.wait({message, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.is_set():
                return await message
            message.cancel()
            return _DISCONNECT

        try:
            await app(scope, receiving, send)
        finally:
            ending.cancel()
