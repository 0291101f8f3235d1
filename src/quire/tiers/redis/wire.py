"""Bytes in and out of a connected socket, within a deadline."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Sequence
from math import ceil

MAX_VECTORS = 512
WAKE_BYTES = 256 << 10
"""Of a long value so many bytes are waited for at a time: on loopback, 1.2 times as fast at 1 MiB."""

LONGEST_S = 86_400.0


class Wire:
    """A connected socket: TCP, TLS over TCP, or Unix. One thread at a time makes use of it.

    Deadlines are instants of `time.monotonic`. Methods raise `TimeoutError` behind one, and `OSError` where the
    connection fails or ends.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._tls = connected if isinstance(connected, ssl.SSLSocket) else None
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connected, select.POLLIN)
        self._writable.register(connected, select.POLLOUT)
        self._is_drained = False
        self._wakes_at = 1

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to be received, not even the end."""
        self._wake_at(1)
        return not self._readable.poll(0) and not (self._tls and self._tls.pending())

    def receive(self, into: memoryview, deadline: float, spare: memoryview | None = None) -> int:
        """Wait for bytes; return how many came, first into one buffer, then into the spare one.

        With a spare buffer, the first one is sure to become full. A wire over TLS leaves the spare one alone.
        """
        if self._is_drained:
            # Asking for bytes first would be in vain.
            self._is_drained = False
            self._wake_at(1 if spare is None or self._tls else min(len(into), WAKE_BYTES))
            self._wait(self._readable, deadline)
        while True:
            try:
                if spare is None or self._tls:
                    wanted = len(into)
                    count = self._socket.recv_into(into)
                else:
                    wanted = len(into) + len(spare)
                    count = self._socket.recvmsg_into((into, spare))[0]
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wake_at(1 if spare is None or self._tls else min(len(into), WAKE_BYTES))
                self._wait(self._readable, deadline)
            except ssl.SSLWantWriteError:
                self._wait(self._writable, deadline)
            else:
                if not count:
                    raise ConnectionResetError("the server closed the connection")
                # A server that always has another byte never lets us wait, so time is looked at here as well.
                _remaining(deadline)
                self._is_drained = count < wanted and not self._tls
                return count

    def send(self, pieces: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send all bytes of all pieces."""
        self._is_drained = not self._tls
        rest = list(pieces)
        while rest:
            _remaining(deadline)
            try:
                if self._tls:
                    count = self._tls.send(rest[0])
                else:
                    count = self._socket.sendmsg(rest[:MAX_VECTORS])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(self._writable, deadline)
            except ssl.SSLWantReadError:
                self._wait(self._readable, deadline)
            else:
                rest = _behind(rest, count)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _wake_at(self, num_bytes: int) -> None:
        """Wait for so many bytes from now on, or the end."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes

    def _wait(self, what: select.poll, deadline: float) -> None:
        if not what.poll(ceil(_remaining(deadline) * 1000)):
            raise TimeoutError


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return min(remaining, LONGEST_S)


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
