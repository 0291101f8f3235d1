"""One Redis server: a few connections of redis-py, taken in turn by many threads."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from quire.errors import InvariantError, TierError
from quire.tiers.addresses import without
from quire.tiers.base import Outcome
from quire.tiers.redis.link import Answer, Failure, Link, RedisRequest, remaining
from quire.tiers.redis.url import Words
from quire.tiers.threads import Permit, Permits

RECEIVE_BYTES = 1 << 20
SEND_BYTES = 1 << 18
"""Asked of the kernel for a socket's two directions. On loopback, less to receive doubles the time of a GET of 64 KiB, and
more to send that of a SET of 1 MiB: what waits to be sent leaves the processor's cache."""


ANSWER_BYTES = 16 << 20
"""Of the answers that redis-py reads: names of a page of keys, a map of slots, a server's state."""


@contextmanager
def tier_errors(words: Words | None = None) -> Generator[None]:
    """Turn redis-py's exceptions into `TimeoutError`, `OSError` for an unreachable server, else `TierError`.

    A server may say anything, the password of `words` among it, and then any of redis-py's parsers fails.
    """
    from redis import exceptions  # noqa: PLC0415 - an extra

    try:
        yield
    except exceptions.TimeoutError:
        raise TimeoutError from None
    except (exceptions.RedisError, exceptions.RedisClusterException, *_RUBBISH) as error:
        said = without(str(error) or type(error).__name__, ((words or {}).get("password", ""),))
        refused = isinstance(error, exceptions.AuthenticationError)
        if isinstance(error, exceptions.ConnectionError) and not refused:
            raise OSError(said) from None
        raise TierError(said) from None
    except RecursionError:
        raise TierError("an answer that is nested too deep") from None


_RUBBISH = (ValueError, TypeError, LookupError, ArithmeticError)


class BoundedSocket:
    """A socket for redis-py with a deadline and a size limit on all answers together.

    The answers to the last request are complete until the deadline, and `ANSWER_BYTES` long at most.
    redis-py's own timeout is for each piece of an answer, of which a server may send any number.

    `plain`   the socket
    `until`   gives the deadline, an instant of `time.monotonic`, whenever something is sent
    """

    def __init__(self, connected: Any, until: Callable[[], float]) -> None:
        self.plain, self._until = connected, until
        self._seconds: float | None = None
        self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def settimeout(self, seconds: float | None) -> None:
        """Wait at most so long for each piece; 0: not at all."""
        self._seconds = seconds

    def sendall(self, data: bytes) -> None:
        """Send a command. Raises `TimeoutError` behind the instant."""
        self._begin()
        self.plain.settimeout(remaining(self._deadline))
        self.plain.sendall(data)

    def recv(self, num_bytes: int) -> bytes:
        """Return the next bytes. Raises `TimeoutError` behind the instant, `OSError` behind `ANSWER_BYTES`."""
        self._prepare()
        data = self.plain.recv(num_bytes)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, *rest: int) -> int:
        """Do the same into a buffer."""
        self._prepare()
        count = self.plain.recv_into(buffer, *rest)
        self._count(count)
        return count

    def _begin(self) -> None:
        self._deadline, self._left = self._until(), ANSWER_BYTES

    def _prepare(self) -> None:
        seconds = self._seconds
        if seconds != 0:
            rest = remaining(self._deadline)
            seconds = rest if seconds is None else min(seconds, rest)
        self.plain.settimeout(seconds)

    def _count(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left < 0:
            raise ConnectionResetError(f"an answer of more than {ANSWER_BYTES} bytes")


def bound(connection: Any, until: Callable[[], float]) -> None:
    """Log in over a new connection of redis-py, whose answers are bounded from now on: its `redis_connect_func`."""
    connection._sock = BoundedSocket(connection._sock, until)  # noqa: SLF001 - redis-py has no other word for it
    connection.on_connect()


class Server:
    """Connections to one server, made by `words`. Any number of threads may ask at once; `limit` are served, others wait.

    A connection is kept for the next one only when everything sent over it was answered and nothing else came; else it
    is closed. A thread uses one with a permit, and the idle ones are never more than were in use at once: `len(idle) <= limit`.
    """

    def __init__(self, words: Words, limit: int) -> None:
        self._words, self._limit = words, limit
        self._is_closed = False
        self._begin()

    def ask(self, requests: Sequence[RedisRequest], deadline: float) -> list[Answer]:
        """Return an answer for each request; after a failure, `Failure` for all that follow it."""
        answers: list[Answer] = []
        try:
            while len(answers) < len(requests):
                # What was answered before a failure stays answered.
                rest = requests[len(answers) :]
                self._use_one(
                    deadline, lambda link, rest=rest: link.exchange(rest, deadline, answers)
                )
        except TimeoutError:
            lost = Failure("no answer in time", Outcome.TIMEOUT, is_answer=False)
        except (TierError, OSError) as error:
            lost = Failure(str(error), is_answer=False)
        else:
            return answers
        return [*answers, *[lost] * (len(requests) - len(answers))]

    def open(self, deadline: float) -> None:
        """Make sure that there is a connection, for the first call. Raises `OSError` and `TierError`."""
        self._use_one(deadline, lambda _: None)

    def close(self) -> None:
        """Close idle connections; those in use are closed when their threads are done."""
        self._is_closed = True
        self._close_idle()

    def check(self) -> None:
        """Verify the conservation law. Raises `InvariantError`."""
        if len(self._idle) > self._limit:
            raise InvariantError(f"{len(self._idle)} idle connections, at most {self._limit}")

    def _use_one(self, deadline: float, use: Callable[[Link], None]) -> None:
        """Give a connection to this thread alone. Wherever a signal cuts this off, the next thread gets its permit."""
        if self._process != os.getpid():
            # After a fork: two processes that read from one connection would take each other's answers.
            self._close_idle()
            self._begin()
        permits, idle = self._permits, self._idle
        permit, link = Permit(), None
        try:
            if not permits.take(permit, deadline - time.monotonic()):
                raise TimeoutError
            link = self._idle_one() or _connect(self._words, deadline)
            use(link)
            if not link.has_unread:
                # In this order: what is idle is never closed below.
                unused, link = link, None
                idle.append(unused)
                if self._is_closed:
                    self._close_idle()
        finally:
            permit.is_over = True
            permits.ended()
            if link is not None:
                link.close()

    def _idle_one(self) -> Link | None:
        while not self._is_closed:
            try:
                link = self._idle.pop()
            except IndexError:
                return None
            try:
                if link.is_quiet:
                    return link
            except BaseException:
                link.close()
                raise
            link.close()
        raise TierError("the tier is closed")

    def _begin(self) -> None:
        self._permits = Permits(self._limit)
        self._idle: deque[Link] = deque()
        self._process = os.getpid()  # last: what is cut off before it is done again

    def _close_idle(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().close()


def _connect(words: Words, deadline: float) -> Link:
    """Return a new connection, secured and logged in by redis-py. Raises `OSError` and `TierError`."""
    options = dict(words)
    seconds = remaining(deadline)
    options |= {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    options["redis_connect_func"] = partial(bound, until=lambda: deadline)
    with tier_errors(words):
        connection = options.pop("connection_class")(**options)
        try:
            connection.connect()
            connected = connection._sock = connection._sock.plain  # noqa: SLF001
            for option, size in ((socket.SO_RCVBUF, RECEIVE_BYTES), (socket.SO_SNDBUF, SEND_BYTES)):
                connected.setsockopt(socket.SOL_SOCKET, option, size)
        except BaseException:
            connection.disconnect()
            raise
    return Link(connected, connection)
