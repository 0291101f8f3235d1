"""The answer of an origin on its way, and the errors that end it."""

# pyright: basic

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

Headers: TypeAlias = list[tuple[bytes, bytes]]
"""Headers in order, names in lower case."""

MOST_BUFFERED = 1 << 18
"""Bytes of an answer that wait for its reader before the connection is read no further."""


class OriginError(Exception):
    """A request without a whole answer.

    `has_begun`  whether a byte of the answer had come
    """

    has_begun = False


class Unreached(OriginError):  # noqa: N818 - what happened, not a programmer's error
    """A connection that was not made: the server has seen nothing of the request."""


class BrokenOff(OriginError):  # noqa: N818 - likewise
    """A connection that ended before the answer did.

    `is_stale`  whether it was an idle one, on which nothing of the answer came: the server may have closed it before
    """

    def __init__(self, message: str, *, is_stale: bool = False) -> None:
        super().__init__(message)
        self.is_stale = is_stale


class OriginAnswer:
    """An answer on its way; as an iterator, the pieces of its body as the server sent them.

    `status`, `headers`  its head, names in lower case
    `has_begun`   whether a byte of it has come
    `is_whole`    whether all of it has come
    `is_sent`     whether the whole body of the request was sent
    `heard_s`     the loop's time at which its connection last brought something, or the request was sent
    Reading raises `OriginError`. `close` ends it at any time: the connection is kept if the answer was whole.
    """

    def __init__(self, connection: Any) -> None:
        self.status = 0
        self.headers: Headers = []
        self.has_begun = self.is_whole = False
        self.is_sent = True
        self.connection = connection
        self.upload: asyncio.Future[None] | None = None
        self._pieces: deque[bytes] = deque()
        self._num_waiting = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def heard_s(self) -> float:
        return self.connection.heard_s

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_whole:
                raise StopAsyncIteration
            await self._wait()
        piece = self._pieces.popleft()
        self._took(len(piece))
        return piece

    async def pending(self) -> bytes:
        """Return all pieces that have come, once one has; empty at the end."""
        first = await anext(self, b"")
        if not self._pieces:
            return first
        pieces = [first, *self._pieces]
        self._pieces.clear()
        self._took(self._num_waiting)
        return b"".join(pieces)

    async def read(self, most: int | None = None) -> bytes:
        """Return the rest of the body. One of more than `most` bytes is `BrokenOff`."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self:
            pieces.append(piece)
            size += len(piece)
            if most is not None and size > most:
                self.give_up(BrokenOff(f"its body has more than {most:,} bytes"))
        return b"".join(pieces)

    def give_up(self, error: Exception) -> None:
        """End the answer: its reader gets the pieces that have come, and then this error."""
        if not self.is_whole and self._error is None:
            self.fail(error)
            self.connection.transport.abort()

    def close(self) -> None:
        """Let the connection go."""
        if self.upload is not None:
            self.upload.cancel()
        # A server that was not sent the whole body still waits for the rest.
        self.connection.release(is_clean=self.is_whole and self.is_sent and self._error is None)

    @property
    def is_full(self) -> bool:
        """Whether the connection is read no further until the reader takes more."""
        return self._num_waiting >= MOST_BUFFERED

    # -- of the connection -----------------------------------------------------------------

    async def head(self) -> None:
        """Wait for the head."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """Have the reader look."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _took(self, size: int) -> None:
        before = self._num_waiting
        self._num_waiting -= size
        if self._num_waiting < MOST_BUFFERED <= before:
            self.connection.transport.resume_reading()

    def add(self, piece: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(piece)
        before = self._num_waiting
        self._num_waiting += len(piece)
        if before < MOST_BUFFERED <= self._num_waiting:
            self.connection.transport.pause_reading()
        self.wake()

    def fail(self, error: Exception) -> None:
        """End with an error behind the pieces that have come."""
        if not self.is_whole and self._error is None:
            self._error = error
            if isinstance(error, OriginError):
                error.has_begun = self.has_begun
        self.wake()
