"""Commands and their replies over one connected socket, each within a deadline: RESP 2 as far as records need it.

Values go from the caller's memory to the socket and from the socket into the caller's memory. Nothing of them is
copied on the way, but for what comes together with the line in front of a value: two to three times as fast as redis-py
(`docs/decisions/redis.md`).

Protocol: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP 2).
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import msgspec

from quire.errors import TierError
from quire.tiers.base import Outcome

LINE_BYTES = 4096
"""Room for what is read ahead: the longest line that a reply may have."""

MAX_VECTORS = 512

WAKE_BYTES = 256 << 10
"""Of a long value so many bytes are waited for at a time: on loopback, 1.2 times as fast at 1 MiB."""

WINDOW_BYTES = 1 << 20
"""Bytes asked for and not answered yet; one command may exceed them.

A server with several megabytes to answer over one connection gives half the bytes per second.
"""

WINDOW_COMMANDS = 256
"""The same in commands: their lines, and the lines of their answers, fit into any socket's buffers."""

LONGEST_S = 86_400.0


class Rubbish(TierError):  # noqa: N818 - reads as what it says
    """An answer that is none."""


class Failure(msgspec.Struct, frozen=True):
    """An error that the server answered; or, not `is_answer`, why there is no answer."""

    text: str
    outcome: Outcome = Outcome.ERROR
    is_answer: bool = True


class Value(msgspec.Struct, frozen=True):
    """A value of known size, the first bytes of which are in the caller's buffer."""

    num_bytes: int


Answer: TypeAlias = int | str | Failure | Value | None
"""An integer, a status, an error, a value in a buffer, nothing."""


class RedisRequest(msgspec.Struct, frozen=True, gc=False):
    """A command and the replies that it may have.

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
    """One connection to a server: TCP, TLS over TCP, or Unix.

    It belongs to one thread at a time; after any error it is unusable.
    Deadlines are instants of `time.monotonic`. Methods raise `TimeoutError` behind one, `OSError` if the connection
    fails or ends, and `Rubbish` for bytes that are no reply. `owner`, the maker of the socket, lives as long as
    the link.

    `is_spent` says that a value was left unread: close it and take another.
    """

    def __init__(self, connected: socket.socket, owner: object = None) -> None:
        self._socket, self._owner = connected, owner
        self._tls = connected if isinstance(connected, ssl.SSLSocket) else None
        self._ahead = bytearray(LINE_BYTES)
        self._view = memoryview(self._ahead)
        self._start: int = 0
        self._end: int = 0
        self._num_owed = 0
        self._wakes_at = 1
        self.is_spent = False

    @property
    def has_unread(self) -> bool:
        """Whether there are replies to come, bytes read ahead behind the last one, or bytes left in a value."""
        return self._num_owed > 0 or self._start != self._end or self.is_spent

    @property
    def is_quiet(self) -> bool:
        """Whether nothing waits to be read: no late answer, no end of the connection."""
        if self.has_unread or (self._tls and self._tls.pending()):
            return False
        self._wake_at(1)
        return not select.select([self._socket], [], [], 0)[0]

    def exchange(
        self, requests: Sequence[RedisRequest], deadline: float, replies: list[Answer]
    ) -> None:
        """Send commands ahead of their replies and append the replies, in order; end early where a value `is_spent`.

        Neither side ever waits for the other to read: answers that are under way are bounded by `WINDOW_BYTES`
        and `WINDOW_COMMANDS`. What is sent is not: a server takes the next value while it stores one.
        """
        # How many bytes the answers have up to each request.
        ends = list(accumulate((len(each.into or b"") for each in requests), initial=0))
        sent = self._send_ahead(requests, ends, 0, 0, deadline)
        for index, request in enumerate(requests):
            reply = self.read(request.into, deadline)
            if not isinstance(reply, request.expects) and not isinstance(reply, Failure):
                raise Rubbish(f"an answer of another kind than the command's: {reply!r:.80}")
            replies.append(reply)
            if self.is_spent:
                return
            # The server answers the next while this one is looked at.
            sent = self._send_ahead(requests, ends, index + 1, sent, deadline)
            if request.arrived is not None and isinstance(reply, Value):
                request.arrived(reply)

    def _send_ahead(
        self,
        requests: Sequence[RedisRequest],
        ends: Sequence[int],
        answered: int,
        sent: int,
        deadline: float,
    ) -> int:
        """Send what fits into the windows, once they are half empty; return how many requests were sent by now."""
        last = min(len(requests), answered + WINDOW_COMMANDS)
        is_half_empty = (
            ends[sent] - ends[answered] < WINDOW_BYTES // 2
            and sent - answered < WINDOW_COMMANDS // 2
        )
        if sent == last or not (sent == answered or is_half_empty):
            return sent
        first = sent
        while sent < last and (sent == answered or ends[sent + 1] - ends[answered] <= WINDOW_BYTES):
            sent += 1
        self.send(requests[first:sent], deadline)
        return sent

    def send(self, requests: Sequence[RedisRequest], deadline: float) -> None:
        """Send commands; their replies are to be read in the same order."""
        self._num_owed += len(requests)
        rest = [piece for each in requests for piece in each.pieces]
        while rest:
            self._socket.settimeout(remaining(deadline))
            count = (
                self._tls.send(rest[0]) if self._tls else self._socket.sendmsg(rest[:MAX_VECTORS])
            )
            rest = _behind(rest, count)

    def read(self, into: memoryview | None, deadline: float) -> Answer:
        """Return the next reply; a value goes into the buffer, as far as that reaches."""
        self._num_owed -= 1
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"$" and into is not None:
            return None if rest == b"-1" else self._value(_length(rest), into, deadline)
        if kind == b"$" and rest == b"-1":
            return None
        if kind == b":":
            return _integer(rest)
        if kind == b"+":
            return rest.decode("latin-1")
        if kind == b"-":
            return Failure(rest.decode("latin-1"))
        raise Rubbish(f"an answer of another kind than the command's: {line[:40]!r}")

    def close(self) -> None:
        """Close the connection; the server sees whatever was not answered yet as gone."""
        self._socket.close()

    def _value(self, length: int, into: memoryview, deadline: float) -> Value:
        fits = min(length, len(into))
        self._fill(into[:fits], deadline)
        if length > fits:
            # Another size than the caller's is rare: a new connection is simpler than reading it to its end.
            self.is_spent = True
        elif self._line(deadline):
            raise Rubbish("a value that does not end where it said")
        return Value(length)

    def _fill(self, into: memoryview, deadline: float) -> None:
        size = len(into)
        ahead = min(self._end - self._start, size)
        into[:ahead] = self._view[self._start : self._start + ahead]
        self._start += ahead
        while ahead < size:
            # Nothing is left of what was read ahead, so the next line may come with the same call.
            self._start = self._end = 0
            ahead += self._receive(into[ahead:], deadline, self._view)
            self._end = max(0, ahead - size)

    def _line(self, deadline: float) -> bytes:
        while (stop := self._ahead.find(b"\r\n", self._start, self._end)) < 0:
            self._read_ahead(deadline)
        line = bytes(self._view[self._start : stop])
        self._start = stop + 2
        return line

    def _read_ahead(self, deadline: float) -> None:
        rest = self._end - self._start
        self._view[:rest] = self._ahead[self._start : self._end]
        self._start, self._end = 0, rest
        if rest == LINE_BYTES:
            raise Rubbish(f"a line of more than {LINE_BYTES} bytes: {bytes(self._view[:40])!r}...")
        self._end += self._receive(self._view[rest:], deadline)

    def _receive(self, into: memoryview, deadline: float, spare: memoryview | None = None) -> int:
        """Wait for bytes; return how many came, first into one buffer, then into the spare one."""
        self._socket.settimeout(remaining(deadline))
        if spare is None or self._tls:
            self._wake_at(1)
            count = self._socket.recv_into(into)
        else:
            # What is left of a value is not waited for once more, where it is little.
            self._wake_at(len(into) if 2 * len(into) < 3 * WAKE_BYTES else WAKE_BYTES)
            count = self._socket.recvmsg_into((into, spare))[0]
        if not count:
            raise ConnectionResetError("the server closed the connection")
        return count

    def _wake_at(self, num_bytes: int) -> None:
        """Wait for so many bytes from now on, or the end."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes


def remaining(deadline: float) -> float:
    """Return the seconds until an instant. Raises `TimeoutError` behind it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return min(seconds, LONGEST_S)


def _length(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > 10:
        raise Rubbish(f"{digits[:40]!r} is no length")
    return int(digits)


def _integer(digits: bytes) -> int:
    if not digits.removeprefix(b"-").isdigit() or len(digits) > 20:
        raise Rubbish(f"{digits[:40]!r} is no integer")
    return int(digits)


def _behind(pieces: list[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    """Return the rest of pieces behind so many bytes."""
    first = 0
    while first < len(pieces) and count >= len(pieces[first]):
        count -= len(pieces[first])
        first += 1
    rest = pieces[first:]
    if count:
        rest[0] = memoryview(rest[0])[count:]
    return rest
