"""HTTP as a server reads it: uvicorn's fastest parser, with limits on heads and connection buffers."""

# pyright: basic

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 1 << 16
"""Bytes of a request line and headers, or of trailers."""

MOST_WAITING = 1 << 20
"""Bytes of requests that were sent behind one that is not answered yet, of which each takes a kilobyte beside its body."""

HEAD_S = 60.0
"""Seconds in which a request's head has to come, from the connection or from its first byte on."""

PRESENCE = "quire.presence"
"""The extension of a request's scope that is its `ClientPresence`."""


class ClientPresence:
    """Whether a request's client is there, and the function that is called once it goes.

    To wait for the message "http.disconnect" instead takes a task for each request.

    `has_sent`  whether the whole body has come
    """

    __slots__ = ("_told", "has_sent", "is_gone")

    def __init__(self) -> None:
        self.is_gone = self.has_sent = False
        self._told: Callable[[], None] | None = None

    def watch(self, told: Callable[[], None]) -> None:
        """Have a function called when the client goes; at once if it has gone."""
        self._told = told
        if self.is_gone:
            told()

    def leave(self) -> None:
        """Have no function called any more."""
        self._told = None

    def go(self) -> None:
        """Note that the client has gone."""
        self.is_gone = True
        if self._told is not None:
            self._told()


def has_come(scope: Any) -> bool:
    """Whether all of a request is known to have come: a timer costs as much as reading a small one."""
    presence = scope.get("extensions", {}).get(PRESENCE)
    return presence is not None and presence.has_sent


class _HeadsHeld:
    """A transport that sends an answer's head with the first of its body.

    uvicorn writes them one after the other, and a system call costs more than all else that a small answer does. A head
    without the body's length, which may be a stream's, is sent at the loop's next turn at the latest.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            if b"\r\ncontent-length: " not in data:
                self._loop.call_soon(self.flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def flush(self) -> None:
        """Send a head that is held."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class HttpProtocol(HttpToolsProtocol):
    """A connection of uvicorn, read by httptools, which would keep a head, or trailers, without end.

    Refused (400) is what goes on for more than `MOST_HEAD` bytes without a whole head, a piece of a body, or an end. A
    connection whose head is not whole within `HEAD_S` to twice as long is closed. A
    connection that was reset is forgotten at once; uvicorn's own waits until an idle one would have been closed. Whoever
    goes is gone for all requests of a connection; uvicorn's own stops to listen once one waits behind another, and would
    tell the last one alone. Whoever sends more than `MOST_WAITING` behind one is cut.
    """

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self._num_read = 0
        self._unanswered = deque[Any]()
        self._is_awaited = False
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport: Any = _HeadsHeld(transport, self.loop)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        super().data_received(data)
        if self._num_read and self._head_timer is None:
            self._await_head()
        if self._num_read > MOST_HEAD and not self.transport.is_closing():
            self.send_400_response(f"the head of a request has at most {MOST_HEAD} bytes")
        if self.pipeline and not self.transport.is_closing():
            if sum(1024 + len(cycle.body) for cycle, _ in self.pipeline) > MOST_WAITING:
                self.transport.abort()
            else:
                self.flow.resume_reading()

    def _await_head(self) -> None:
        """Look whether a head is awaited; if it is the one that was awaited at the last look, close the connection."""
        self._head_timer = None
        is_running = self.cycle is not None and not self.cycle.response_complete
        is_upgraded = self.transport.get_protocol() is not self
        if is_running or is_upgraded or (self.cycle is not None and not self._num_read):
            return
        if self._is_awaited:
            self.transport.abort()
            return
        self._is_awaited = True
        self._head_timer = self.loop.call_later(HEAD_S, self._await_head)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                cycle.scope["extensions"][PRESENCE].go()

    def on_headers_complete(self) -> None:
        self._num_read, self._is_awaited = 0, False
        super().on_headers_complete()
        self.scope["headers"] = [*self.headers]  # uvicorn would append the trailers of the body
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        if self.cycle is not None:
            extensions: Any = {PRESENCE: ClientPresence()}
            self.scope["extensions"] = extensions
            self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_read = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_read = 0
        super().on_message_complete()
        extensions: Any = self.scope.get("extensions")
        if extensions:
            extensions[PRESENCE].has_sent = True

    def on_response_complete(self) -> None:
        self.transport.flush()  # of an answer to HEAD, which has no body
        super().on_response_complete()
