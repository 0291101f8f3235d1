"""A relay between clients and one server: bytes pass through as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from quire.web.clients import until_gone
from quire.web.errors import ApiError, error_document
from quire.web.mends import MENDED, Mended, Mends
from quire.web.origin import OriginClient, OriginRequest, passed, target_of
from quire.web.origin_answer import OriginError


class _Upload:
    """A request's body on its way; `after` receives what a client says once it has sent all of it."""

    def __init__(self, receive: Receive) -> None:
        self.done, self.is_answered = asyncio.Event(), False
        self._receive = receive

    async def pieces(self) -> AsyncGenerator[bytes]:
        while not self.done.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if not message.get("more_body", False):
                self.done.set()
            if piece := message.get("body", b""):
                yield piece

    async def after(self) -> Message:
        await self.done.wait()
        message = await self._receive()
        if self.is_answered:  # uvicorn says behind a whole answer, too, that the client is gone
            await asyncio.Event().wait()
        return message


class Relay:
    """An ASGI application that passes requests on to a server, and answers back.

    Heads lose the headers of one connection, and nothing else is changed but by `mends`: compressed bodies stay
    compressed, and each piece of an answer is sent as it comes. A client that goes ends its request at the server. An
    answer that the server breaks off breaks off for the client. Raises `ConfigError` for an invalid URL.

    `mends` rules by which requests are changed
    `most`  bytes of a body that is changed; longer ones pass
    """

    def __init__(self, upstream: str, mends: Mends | None = None, *, most: int) -> None:
        # Servers on this machine close connections when they like; behind TLS, a new one for each request costs more.
        idle_s = 20.0 if upstream.startswith("https") else 0.0
        self._origin = OriginClient(upstream, idle_s=idle_s)
        self.upstream = self._origin.url
        self.mends, self._most = mends or Mends(()), most

    async def aclose(self) -> None:
        """Close all connections to the server."""
        self._origin.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket: none of these APIs is one
            await receive()
            await send({"type": "websocket.close", "code": 1011})
            return
        upload, is_begun = _Upload(receive), False

        async def sent(message: Message) -> None:
            nonlocal is_begun
            is_begun = True
            await send(message)

        try:
            await until_gone(Request(scope, upload.after), self._pass(scope, upload, sent))
        except ClientDisconnect:
            pass
        except OriginError as error:
            if not is_begun:
                await self._refuse(scope, error, send)
            # An answer that has begun is left without its end, so that the connection is closed.

    async def _pass(self, scope: Scope, upload: _Upload, send: Send) -> None:
        """Ask the server, and send its answer. Raises `OriginError`."""
        has_body = any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in scope["headers"]
        )
        if not has_body:
            upload.done.set()
        headers, body = passed(scope["headers"]), upload.pieces() if has_body else None
        mended = None
        if body is not None and self.mends.reads(scope["method"], scope["path"], headers):
            body, mended = await self._mended(scope, body)
        if mended is not None:
            headers = passed(mended.headers)
        asked = OriginRequest(scope["method"], target_of(scope), headers, body)
        answer = await self._origin.ask(asked)
        try:
            said = passed(answer.headers)
            if mended is not None:
                said.append((MENDED.lower().encode(), mended.told.encode()))
            head = {"status": answer.status, "headers": said}
            await send({"type": "http.response.start", **head})
            async for piece in answer:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            upload.is_answered = True
            await send({"type": "http.response.body"})
        finally:
            answer.close()

    async def _mended(
        self, scope: Scope, pieces: AsyncGenerator[bytes]
    ) -> tuple[bytes | AsyncGenerator[bytes], Mended | None]:
        """Return a request's body, and how it was changed; None for one that passes as it is, or is too long."""
        body = bytearray()
        async for piece in pieces:
            body += piece
            if len(body) > self._most:
                self.mends.num_unread += 1
                return _joined(bytes(body), pieces), None
        mended = await self.mends.of(scope, bytes(body), self._most)
        return bytes(body) if mended is None else mended.body, mended

    async def _refuse(self, scope: Scope, error: OriginError, send: Send) -> None:
        """Answer 502 for a server that gave no answer."""
        told = ApiError(
            502,
            f"quire tap got no answer from {self.upstream}: {error}; see that it runs",
            code="no_upstream",
        )
        body = msgspec.json.encode(error_document(scope["path"], told))
        said = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        scope.setdefault("state", {})["end"] = "no server"
        await send({"type": "http.response.start", "status": 502, "headers": said})
        await send({"type": "http.response.body", "body": body})


async def _joined(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield what came of a body, then the rest."""
    yield first
    async for piece in rest:
        yield piece
