"""RESP 2 over one connection: commands out, replies in, each within a deadline.

Values go from the caller's memory to the socket and from the socket into the caller's memory; nothing of them is
copied on the way, but for what comes together with the line in front of a value.

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP 2).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from quire.errors import TierError
from quire.tiers.redis.wire import Wire

LINE_BYTES = 4096
"""Room for what is read ahead: the longest line that a reply may have."""

CONTROL_BYTES = 8 << 20
"""The most that a reply takes of memory that is not the caller's: its values, and 64 bytes for each item."""

DRAIN_BYTES = 8 << 20
"""How much of a value that does not fit is read and thrown away; beyond, a new connection is cheaper."""

MAX_DEPTH = 8


class Rubbish(TierError):  # noqa: N818 - reads as what it says
    """An answer that is none."""


class Failure(msgspec.Struct, frozen=True):
    """An error that the server answered."""

    text: str


class Value(msgspec.Struct, frozen=True):
    """A value of so many bytes, of which the caller's buffer holds the first."""

    num_bytes: int


Reply: TypeAlias = "int | str | bytes | Failure | Value | list[Reply] | None"
"""An integer, a status, a short value, an error, a value in a buffer, an array, nothing."""


class RedisRequest(msgspec.Struct, frozen=True, gc=False):
    """A command and what its answer may be.

    `pieces`   its bytes, in parts; not copied
    `expects`  the types of an answer that is none of `Failure`
    `into`     where the value of the answer goes
    `arrived`  called with a value that is there, while its bytes are in the processor's cache
    """

    pieces: tuple[bytes | memoryview, ...]
    expects: tuple[type, ...]
    into: memoryview | None = None
    arrived: Callable[[Value], None] | None = None


def command(*words: bytes) -> bytes:
    """Return the bytes of a command."""
    parts = [b"*%d\r\n" % len(words)]
    parts += [b"$%d\r\n%b\r\n" % (len(word), word) for word in words]
    return b"".join(parts)


class Link:
    """One connection. It belongs to one thread at a time; after any error it is of no more use.

    Methods raise as a `Wire` does, and `Rubbish` for bytes that are no reply. Each command has one reply.

    `is_spent` says that a value was left unread: close it and take another.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._wire = Wire(connected)
        self._ahead = bytearray(LINE_BYTES)
        self._view = memoryview(self._ahead)
        self._start: int = 0
        self._end: int = 0
        self._left = CONTROL_BYTES
        self._num_owed = 0
        self._usual, self._usual_line = Value(0), b"$0\r\n"
        self.is_spent = False

    @property
    def has_unread(self) -> bool:
        """Whether there are replies to come, bytes read ahead behind the last one, or bytes left in a value."""
        return self._num_owed > 0 or self._start != self._end or self.is_spent

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: no late answer, no end of the connection."""
        return not self.has_unread and self._wire.is_quiet

    def send(self, requests: Sequence[RedisRequest], deadline: float) -> None:
        """Send commands; their replies are to be read in the same order."""
        self._num_owed += len(requests)
        self._wire.send([piece for each in requests for piece in each.pieces], deadline)

    def read(self, into: memoryview | None, deadline: float, depth: int = 0) -> Reply:
        """Return the next reply; a value goes into the buffer, as far as that reaches."""
        if not depth:
            self._num_owed -= 1
            self._left = CONTROL_BYTES
        if into is not None:
            usual = self._usual
            if usual.num_bytes != len(into):
                self._usual = usual = Value(len(into))
                self._usual_line = b"$%d\r\n" % len(into)
            if self._begins_with(self._usual_line, deadline):
                self._fill(into, deadline)
                self._end_of_value(deadline)
                return usual
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            length = _length(rest)
            if length is None:
                return None
            if into is None:
                return self._short_value(length, deadline)
            return self._value(length, into, deadline)
        if kind == b":":
            return _integer(rest)
        if kind == b"+":
            return rest.decode("latin-1")
        if kind == b"-":
            return Failure(rest.decode("latin-1"))
        if kind == b"*":
            return self._items(_length(rest), deadline, depth)
        raise Rubbish(f"{line[:40]!r} begins no reply")

    def close(self) -> None:
        """Close the connection; the server sees whatever was not answered yet as gone."""
        self._wire.close()

    def _items(self, length: int | None, deadline: float, depth: int) -> Reply:
        if length is None:
            return None
        if depth > MAX_DEPTH:
            raise Rubbish(f"arrays in arrays, {depth} deep")
        self._take(64 * length)
        return [self.read(None, deadline, depth + 1) for _ in range(length)]

    def _short_value(self, length: int, deadline: float) -> bytes:
        self._take(length)
        value = bytearray(length)
        self._value(length, memoryview(value), deadline)
        return bytes(value)

    def _take(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise Rubbish(f"{num_bytes} bytes more, where a reply takes {CONTROL_BYTES} at most")

    def _value(self, length: int, into: memoryview, deadline: float) -> Value:
        fits = min(length, len(into))
        self._fill(into[:fits], deadline)
        if length - fits > DRAIN_BYTES:
            self.is_spent = True
        else:
            self._drain(length - fits, deadline)
            self._end_of_value(deadline)
        return Value(length)

    def _fill(self, into: memoryview, deadline: float) -> None:
        size = len(into)
        ahead = min(self._end - self._start, size)
        into[:ahead] = self._view[self._start : self._start + ahead]
        self._start += ahead
        while ahead < size:
            # Nothing is left of what was read ahead, so the next line may come with the same call.
            self._start, self._end = 0, 0
            ahead += self._wire.receive(into[ahead:] if ahead else into, deadline, self._view)
            if ahead > size:
                self._end = ahead - size

    def _end_of_value(self, deadline: float) -> None:
        if not self._begins_with(b"\r\n", deadline):
            raise Rubbish("a value that does not end where it said")

    def _drain(self, length: int, deadline: float) -> None:
        while length:
            if self._start == self._end:
                self._read_ahead(deadline)
            dropped = min(length, self._end - self._start)
            self._start += dropped
            length -= dropped

    def _begins_with(self, expected: bytes, deadline: float) -> bool:
        """Return whether these bytes come next, and step over them."""
        size = len(expected)
        while self._end - self._start < size:
            if not expected.startswith(self._view[self._start : self._end]):
                return False
            self._read_ahead(deadline)
        if not self._ahead.startswith(expected, self._start):
            return False
        self._start += size
        return True

    def _line(self, deadline: float) -> bytes:
        while (stop := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            self._read_ahead(deadline)
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        return line

    def _read_ahead(self, deadline: float) -> None:
        if self._start:
            rest = self._end - self._start
            self._view[:rest] = self._ahead[self._start : self._end]
            self._start, self._end = 0, rest
        if self._end == LINE_BYTES:
            raise Rubbish(f"a line of more than {LINE_BYTES} bytes: {bytes(self._view[:40])!r}...")
        self._end += self._wire.receive(self._view[self._end :], deadline)


def _length(digits: bytes) -> int | None:
    if digits == b"-1":
        return None
    if not digits.isdigit() or len(digits) > 10:
        raise Rubbish(f"{digits[:40]!r} is no length")
    return int(digits)


def _integer(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise Rubbish(f"{digits[:40]!r} is no integer")
    return int(digits)
