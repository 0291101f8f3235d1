"""An HTTP/1.1 client of one server for relays: heads and bodies pass as they come.

One connection carries one request at a time; idle ones are kept for the next request. An HTTP client library costs
about 1 ms of CPU a request; this costs a tenth.
"""

# pyright: basic

import asyncio
import ssl
from collections.abc import AsyncIterable
from contextlib import aclosing, suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from quire.errors import ConfigError
from quire.web.origin_answer import BrokenOff, Headers, OriginAnswer, Unreached

OF_THE_HOP = frozenset(
    (b"connection", b"expect", b"host", b"keep-alive", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip
"""Headers of one connection, which are not passed on."""

MOST_HEAD = 1 << 18
"""Bytes of an answer's head, beyond which it is none."""

MOST_IDLE = 256
"""Idle connections that an origin keeps."""


class OriginRequest(NamedTuple):
    """A request: `target` has path and query; `headers` have none of a connection's."""

    method: str
    target: bytes
    headers: Headers
    body: bytes | AsyncIterable[bytes] | None = None


def passed(headers: Headers) -> Headers:
    """Return headers without those of one connection: the known ones, and those that `Connection` names."""
    own = [value for name, value in headers if name == b"connection"]
    dropped = OF_THE_HOP
    if own and own != [b"keep-alive"]:
        dropped |= {word.strip().lower() for value in own for word in value.split(b",")}
    return [pair for pair in headers if pair[0] not in dropped]


def target_of(scope: Any) -> bytes:
    """Return the path and query of an ASGI request as they were sent."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    path = path.partition(b"?")[0]
    return path + (b"?" + scope["query_string"] if scope["query_string"] else b"")


class OriginClient:
    """A server and the connections to it. Raises `ConfigError` for an invalid URL; `what` names its option.

    `idle_s`     seconds for which an idle connection is kept; 0: each request has its own
    `connect_s`  seconds in which the server takes a connection
    `heard_s`    the loop's time at which any of its connections last brought something
    `answers`    those on their way
    """

    def __init__(
        self, url: str, *, what: str = "--upstream", idle_s: float = 0.0, connect_s: float = 10.0
    ) -> None:
        wrong = ConfigError(f"{what} is http://HOST:PORT or https://HOST, got {url!r}")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise wrong
        if parts.username is not None:
            raise ConfigError(f"{what} has no user: clients send their keys themselves")
        self.url = url.rstrip("/")
        self.heard_s = 0.0
        self.answers: set[OriginAnswer] = set()
        self._idle_s, self._connect_s = idle_s, connect_s
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", port or (443 if self._is_tls else 80)
        self._base = parts.path.rstrip("/").encode()
        self._named = parts.netloc.encode()
        self._context: ssl.SSLContext | None = None
        self.idle: dict[_Connection, None] = {}  # in the order in which they became idle

    async def ask(self, asked: OriginRequest, *, is_fresh: bool = False) -> OriginAnswer:
        """Return an answer whose head has come; close it. Raises `OriginError`.

        `is_fresh`  whether the request has a new connection
        """
        connection = None if is_fresh else self._idle_connection()
        connection = connection or await self._connected()
        answer = connection.begin(is_head=asked.method == "HEAD")
        self.answers.add(answer)
        try:
            body = asked.body if asked.body is not None else b""
            head = self._head(asked)
            if isinstance(body, bytes):
                connection.transport.write(head + body)
            else:
                connection.transport.write(head)
                answer.is_sent = False
                is_chunked = not any(name == b"content-length" for name, _ in asked.headers)
                answer.upload = asyncio.ensure_future(
                    _uploaded(connection, answer, body, is_chunked=is_chunked)
                )
            await answer.head()
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self.idle, *(each.connection for each in self.answers)]:
            connection.transport.abort()

    def _head(self, asked: OriginRequest) -> bytes:
        lines = [
            asked.method.encode(), b" ", self._base, asked.target, b" HTTP/1.1\r\nhost: ", self._named, b"\r\n"
        ]  # fmt: skip
        is_sized = False
        for name, value in asked.headers:
            is_sized = is_sized or name == b"content-length"
            lines += (name, b": ", value, b"\r\n")
        if asked.body is not None and not is_sized:
            if isinstance(asked.body, bytes):
                lines.append(b"content-length: %d\r\n" % len(asked.body))
            else:
                lines.append(b"transfer-encoding: chunked\r\n")
        if not self._idle_s:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def _idle_connection(self) -> "_Connection | None":
        """Return the connection that was used last, unless it has been idle for too long."""
        now = asyncio.get_running_loop().time()
        while self.idle:
            connection, _ = self.idle.popitem()
            if now - connection.heard_s < self._idle_s and not connection.transport.is_closing():
                return connection
            connection.transport.abort()
        return None

    async def _connected(self) -> "_Connection":
        if self._is_tls and self._context is None:
            self._context = ssl.create_default_context()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, loop), self._host, self._port, ssl=self._context
                )
        except TimeoutError:
            raise Unreached(f"no connection within {self._connect_s:g} s") from None
        except (OSError, UnicodeError) as error:  # the second for a name that DNS cannot have
            raise Unreached(str(error) or type(error).__name__) from error
        return connection

    def keep(self, connection: "_Connection") -> None:
        """Keep an idle connection, or close it."""
        if self._idle_s and len(self.idle) < MOST_IDLE:
            self.idle[connection] = None
        else:
            connection.transport.abort()


class _Connection(asyncio.Protocol):
    """A connection to an origin, and the answer that it brings."""

    transport: asyncio.Transport

    def __init__(self, origin: OriginClient, loop: asyncio.AbstractEventLoop) -> None:
        self.heard_s = loop.time()
        self._origin, self._loop = origin, loop
        self._answer: OriginAnswer | None = None
        self._num_answers = self._num_heard = 0
        self._is_head = self._ends_with_connection = self._keeps_alive = False
        self._headers: Headers = []
        self._writable: asyncio.Future[None] | None = None

    def begin(self, *, is_head: bool) -> OriginAnswer:
        """Return the answer of the next request."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._answer, self._is_head, self._headers = OriginAnswer(self), is_head, []
        self._ends_with_connection = self._keeps_alive = False
        self.heard_s = self._loop.time()
        self._num_answers, self._num_heard = self._num_answers + 1, 0
        return self._answer

    def release(self, *, is_clean: bool) -> None:
        """Let go of the answer; the connection is kept where it can carry another one."""
        answer, self._answer = self._answer, None
        if answer is None:
            return
        self._origin.answers.discard(answer)
        if self.transport.is_closing():
            return
        is_sent = not self.transport.get_write_buffer_size()  # else the server has not read it all
        if is_clean and is_sent and self._keeps_alive:
            if answer.is_full:
                self.transport.resume_reading()
            self._origin.keep(self)
        else:
            self.transport.abort()

    async def writable(self) -> None:
        """Wait until the server takes more of a body."""
        if self._writable is not None:
            await self._writable

    # -- asyncio's protocol ----------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._origin.heard_s = self._loop.time()
        if self._answer is None or self._answer.is_whole:  # nothing was asked
            self.transport.abort()
            return
        answer = self._answer
        answer.has_begun = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.fail(BrokenOff(f"no HTTP/1.1 answer: {error}"))
            self.transport.abort()
        if not answer.status:
            self._num_heard += len(data)
            if self._num_heard > MOST_HEAD:
                answer.give_up(BrokenOff(f"its head has more than {MOST_HEAD:,} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._origin.idle.pop(self, None)
        self.resume_writing()
        answer = self._answer
        if answer is None:
            return
        if self._ends_with_connection and exc is None:
            self.on_message_complete()
            return
        is_stale = self._num_answers > 1 and not answer.has_begun
        said = f"the connection broke off: {exc}" if exc else "the connection was closed"
        answer.fail(BrokenOff(said, is_stale=is_stale))

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    # -- the parser's protocol -------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answer is not None and self._answer.is_whole:  # nothing was asked
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status, answer = self._parser.get_status_code(), self._answer
        headers, self._headers = self._headers, []  # trailers are none
        if 100 <= status < 200 or answer is None or answer.is_whole:  # the answer itself follows
            return
        if status in (204, 304):  # the length is that of another answer's body
            headers = [pair for pair in headers if pair[0] != b"content-length"]
        answer.headers, answer.status = headers, status
        if self._is_head:
            answer.is_whole = True
        elif status not in (204, 304):
            names = {name for name, _ in answer.headers}
            self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        answer.wake()

    def on_body(self, piece: bytes) -> None:
        if self._answer is not None and not self._answer.is_whole:
            self._answer.add(piece)

    def on_message_complete(self) -> None:
        if self._answer is not None and self._answer.status and not self._answer.is_whole:
            self._answer.is_whole = True
            self._keeps_alive = self._parser.should_keep_alive()
            self._answer.wake()


async def _uploaded(
    connection: _Connection, answer: OriginAnswer, body: Any, *, is_chunked: bool
) -> None:
    """Send a body piece by piece; an error of its source ends the answer."""
    try:
        async with aclosing(body):
            async for piece in body:
                if connection.transport.is_closing():
                    return
                connection.transport.write(
                    b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece
                )
                await connection.writable()
        if is_chunked:
            connection.transport.write(b"0\r\n\r\n")
        answer.is_sent = True
    except Exception as error:  # noqa: BLE001 - the reader of the answer gets it
        with suppress(RuntimeError):
            answer.give_up(error)
