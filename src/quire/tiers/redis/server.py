"""One Redis server: a few connections of redis-py, taken in turn by many threads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from quire.errors import InvariantError, TierError
from quire.tiers.addresses import without
from quire.tiers.base import Outcome
from quire.tiers.redis.link import Answer, Failure, Link, RedisRequest, remaining
from quire.tiers.redis.url import Words

RECEIVE_BYTES = 1 << 20
SEND_BYTES = 1 << 18
"""Asked of the kernel for a socket's two directions. On loopback, less to receive doubles the time of a GET of 64 KiB, and
more to send that of a SET of 1 MiB: what waits to be sent leaves the processor's cache."""


@contextmanager
def tier_errors(words: Words | None = None) -> Generator[None]:
    """Turn what redis-py raises into `TimeoutError`, `OSError` where nobody is reached, and `TierError` for the rest.

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


_RUBBISH = (ValueError, TypeError, LookupError, ArithmeticError)


class Server:
    """Connections to one server, made by `words`. Any number of threads may ask at once; `limit` are served, others wait.

    A connection goes back only when everything sent over it was answered and nothing else came;
    else it is closed. `num_open = len(idle) + those that a thread has`, and `num_open <= limit`.
    """

    def __init__(self, words: Words, limit: int) -> None:
        self._words = words
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Link] = []
        self._num_open = 0
        self._is_closed = False
        self._process = os.getpid()

    def ask(self, requests: Sequence[RedisRequest], deadline: float) -> list[Answer]:
        """Return an answer for each request; after a failure, `Failure` for all that follow it."""
        answers: list[Answer] = []
        try:
            while len(answers) < len(requests):
                # What was answered before a failure stays answered.
                self._ask_over_one(requests[len(answers) :], deadline, answers)
        except TimeoutError:
            lost = Failure("no answer in time", Outcome.TIMEOUT, is_answer=False)
        except (TierError, OSError) as error:
            lost = Failure(str(error), is_answer=False)
        else:
            return answers
        return [*answers, *[lost] * (len(requests) - len(answers))]

    def open(self, deadline: float) -> None:
        """Make sure that there is a connection. Raises `OSError` and `TierError`."""
        self._give_back(self._take(deadline))

    def close(self) -> None:
        """Close what is idle; what threads have is closed when they are done."""
        with self._changed:
            self._is_closed = True
            self._close_idle()
            self._changed.notify_all()

    def check(self) -> None:
        """Verify the conservation law. Raises `InvariantError`."""
        with self._changed:
            if not len(self._idle) <= self._num_open <= self._limit:
                raise InvariantError(
                    f"{len(self._idle)} idle of {self._num_open} connections, at most {self._limit}"
                )

    def _ask_over_one(
        self, requests: Sequence[RedisRequest], deadline: float, answers: list[Answer]
    ) -> None:
        link = self._take(deadline)
        try:
            link.exchange(requests, deadline, answers)
        except BaseException:
            self._drop(link)
            raise
        self._give_back(link)

    def _take(self, deadline: float) -> Link:
        with self._changed:
            while True:
                if self._is_closed:
                    raise TierError("the tier is closed")
                self._leave_parent()
                while self._idle:
                    link = self._idle.pop()
                    if link.is_quiet:
                        return link
                    link.close()
                    self._num_open -= 1
                if self._num_open < self._limit:
                    self._num_open += 1
                    break
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
        try:
            return _connect(self._words, deadline)
        except BaseException:
            self._forget_one()
            raise

    def _give_back(self, link: Link) -> None:
        with self._changed:
            if not (self._is_closed or link.has_unread):
                self._idle.append(link)
                self._changed.notify()
                return
        self._drop(link)

    def _drop(self, link: Link) -> None:
        link.close()
        self._forget_one()

    def _forget_one(self) -> None:
        with self._changed:
            self._num_open -= 1
            self._changed.notify()

    def _leave_parent(self) -> None:
        """After a fork: two processes that read from one connection would take each other's answers."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._close_idle()
            self._num_open = 0

    def _close_idle(self) -> None:
        for link in self._idle:
            link.close()
        self._num_open -= len(self._idle)
        self._idle.clear()


def _connect(words: Words, deadline: float) -> Link:
    """Return a new connection, secured and logged in by redis-py. Raises `OSError` and `TierError`."""
    options = dict(words)
    seconds = remaining(deadline)
    options |= {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    with tier_errors(words):
        connection = options.pop("connection_class")(**options)
        connection.connect()
        connected = connection._sock  # noqa: SLF001 - redis-py has no other word for it
        for option, size in ((socket.SO_RCVBUF, RECEIVE_BYTES), (socket.SO_SNDBUF, SEND_BYTES)):
            connected.setsockopt(socket.SOL_SOCKET, option, size)
    return Link(connected, connection)
