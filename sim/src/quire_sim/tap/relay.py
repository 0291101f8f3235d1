"""A relay between clients and one server: bytes pass through as they come, and each exchange is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Literal, TypeAlias

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from quire.web.clients import until_gone
from quire.web.errors import ApiError, error_document
from quire.web.origin import OriginClient, OriginRequest, passed, target_of
from quire.web.origin_answer import Headers, OriginError

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


class _Kept:
    """The bytes of a body, up to `most`; None once there were more."""

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, bytearray()
        self._is_over = False

    def add(self, piece: bytes) -> None:
        if not self._is_over and len(self._bytes) + len(piece) <= self._most:
            self._bytes += piece
        else:
            self._is_over, self._bytes = True, bytearray()

    @property
    def whole(self) -> bytes | None:
        return None if self._is_over else bytes(self._bytes)


class _Upload:
    """A request's body on its way; `after` receives what a client says once it has sent all of it."""

    def __init__(self, receive: Receive, most: int) -> None:
        self.kept, self.done = _Kept(most), asyncio.Event()
        self.is_answered = False
        self._receive = receive

    async def pieces(self) -> AsyncGenerator[bytes]:
        while not self.done.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            if not message.get("more_body", False):
                self.done.set()
            if piece:
                self.kept.add(piece)
                yield piece

    async def after(self) -> Message:
        await self.done.wait()
        message = await self._receive()
        if self.is_answered:  # uvicorn says behind a whole answer, too, that the client is gone
            await asyncio.Event().wait()
        return message


class Relay:
    """An ASGI application that passes requests on to a server, and answers back.

    Heads lose the headers of one connection, and nothing else is changed: compressed bodies stay compressed, and each
    piece of an answer is sent as it comes. A client that goes ends its request at the server. An answer that the
    server breaks off breaks off for the client. Raises `ConfigError` for an invalid URL.

    `tell`  is called with each exchange at its end
    `most`  bytes of a body that are kept for `tell`; longer ones pass as well
    """

    def __init__(self, upstream: str, tell: Callable[[Exchange], None], *, most: int) -> None:
        # Servers on this machine close connections when they like; behind TLS, a new one for each request costs more.
        idle_s = 20.0 if upstream.startswith("https") else 0.0
        self._origin = OriginClient(upstream, idle_s=idle_s)
        self.upstream = self._origin.url
        self._tell, self._most = tell, most

    async def aclose(self) -> None:
        """Close all connections to the server."""
        self._origin.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket: none of these APIs is one
            await receive()
            await send({"type": "websocket.close", "code": 1011})
            return
        began = time.monotonic()
        exchange = Exchange(scope["method"], scope["path"], scope["headers"], time.time())
        upload, kept = _Upload(receive, self._most), _Kept(self._most)
        is_begun = False

        async def sent(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            if piece := message.get("body", b""):
                kept.add(piece)
                if exchange.first_s is None:
                    exchange.first_s = time.monotonic() - began
            await send(message)

        try:
            work = self._pass(scope, upload, exchange, sent)
            await until_gone(Request(scope, upload.after), work)
        except ClientDisconnect:
            exchange.end = "client gone"
        except OriginError as error:
            exchange.end = "server broke off" if is_begun else "no server"
            if not is_begun:
                await self._refuse(exchange, error, send)
            # An answer that has begun is left without its end, so that the connection is closed.
        finally:
            exchange.duration_s = time.monotonic() - began
            exchange.sent, exchange.told = upload.kept.whole, kept.whole
            self._tell(exchange)

    async def _pass(self, scope: Scope, upload: _Upload, exchange: Exchange, send: Send) -> None:
        """Ask the server, and send its answer. Raises `OriginError`."""
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        if not has_body:
            upload.done.set()
        body = upload.pieces() if has_body else None
        asked = OriginRequest(scope["method"], target_of(scope), passed(scope["headers"]), body)
        answer = await self._origin.ask(asked)
        try:
            exchange.status = answer.status
            exchange.said = passed(answer.headers)
            head = {"status": exchange.status, "headers": exchange.said}
            await send({"type": "http.response.start", **head})
            async for piece in answer:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            upload.is_answered = True
            await send({"type": "http.response.body"})
        finally:
            answer.close()

    async def _refuse(self, exchange: Exchange, error: OriginError, send: Send) -> None:
        """Answer 502 for a server that gave no answer."""
        said = ApiError(
            502,
            f"quire tap got no answer from {self.upstream}: {error}; see that it runs",
            code="no_upstream",
        )
        body = msgspec.json.encode(error_document(exchange.path, said))
        exchange.status = 502
        exchange.said = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        head = {"status": exchange.status, "headers": exchange.said}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": body})
