"""Exchanges of an ASGI application: each request and its answer, told at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.web.clients import has_gone
from quire.web.mend_rules import MendDifference
from quire.web.origin import passed
from quire.web.origin_answer import Headers

MOST_HELD = 256 << 20
"""Bytes of bodies on their way that are kept together; what is more than that is not kept."""

End: TypeAlias = Literal["whole", "client gone", "server broke off", "no server"]


class Exchange(msgspec.Struct):
    """A request and its answer, as they passed.

    `path`        the path, without its query
    `headers`     of the request; they have credentials, which nothing may keep
    `sent_s`      when its head had come, in seconds since 1970
    `first_s`     seconds from there to the first bytes of the answer's body; None if there were none
    `duration_s`  seconds from there to the end
    `sent`, `told` the two bodies; None for one that is longer than the relay keeps
    `said`        headers of the answer
    `usage`       tokens of the prompt, of them those found, and of the answer, where the application told them beside
    `differences` between the request as it came and as it was passed on, which `sent` is
    `end`         how it ended
    """

    method: str
    path: str
    headers: Headers
    sent_s: float
    first_s: float | None = None
    duration_s: float = 0.0
    sent: bytes | None = b""
    status: int = 0
    said: Headers = []
    told: bytes | None = b""
    end: End = "whole"
    usage: tuple[int, int, int] | None = None
    differences: tuple[MendDifference, ...] = ()


class _Held:
    """The bytes of all bodies that are kept."""

    num = 0


class _Kept:
    """The bytes of a body, up to `most`; None once there were more."""

    def __init__(self, most: int, held: _Held) -> None:
        self._most, self._held, self._bytes = most, held, bytearray()
        self._is_over = False

    def add(self, piece: bytes) -> None:
        is_room = self._held.num + len(piece) <= MOST_HELD
        if not self._is_over and is_room and len(self._bytes) + len(piece) <= self._most:
            self._bytes += piece
            self._held.num += len(piece)
        else:
            self.take()
            self._is_over = True

    def take(self) -> bytes | None:
        """Return the body, and keep it no more."""
        found = None if self._is_over else bytes(self._bytes)
        self._held.num -= len(self._bytes)
        self._bytes = bytearray()
        return found


class Observed:
    """An ASGI application around another one that tells each exchange of it.

    `tell`  is called with each exchange at its end
    `most`  bytes of a body that are kept for `tell`

    An application may say in `scope["state"]` how the request was `mended`, what `usage` it had, and its `end`.
    """

    def __init__(self, app: ASGIApp, tell: Callable[[Exchange], None], *, most: int) -> None:
        self._app, self._tell, self._most = app, tell, most
        self._held = _Held()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        exchange = Exchange(scope["method"], scope["path"], scope["headers"], time.time())
        sent, told = _Kept(self._most, self._held), _Kept(self._most, self._held)
        is_whole = False
        exchange.end = "server broke off"

        async def came() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.end = "client gone"
            elif piece := message.get("body", b""):
                sent.add(piece)
            return message

        async def said(message: Message) -> None:
            nonlocal is_whole
            if message["type"] == "http.response.start":
                exchange.status, exchange.said = message["status"], passed([*message["headers"]])
            elif piece := message.get("body", b""):
                told.add(piece)
                if exchange.first_s is None:
                    exchange.first_s = time.monotonic() - began
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                is_whole = True

        try:
            await self._app(scope, came, said)
        except ClientDisconnect:
            exchange.end = "client gone"
            raise
        finally:
            exchange.duration_s = time.monotonic() - began
            exchange.sent, exchange.told = sent.take(), told.take()
            state: dict[str, Any] = scope.get("state", {})
            if is_whole:
                exchange.end = state.get("end", "whole")
            elif has_gone(scope):
                exchange.end = "client gone"
            if (mended := state.get("mended")) is not None:
                exchange.sent, exchange.differences = mended.body, mended.differences
            exchange.usage = state.get("usage")
            self._tell(exchange)
