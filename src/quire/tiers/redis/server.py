"""One Redis server: a few connections, taken in turn by many threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from quire.errors import InvariantError, TierError
from quire.tiers.base import Outcome
from quire.tiers.redis.exchange import exchange
from quire.tiers.redis.resp import Link, RedisRequest, Reply, command


class NoAnswer(msgspec.Struct, frozen=True):
    """No answer, and why: `TIMEOUT` or `ERROR`."""

    outcome: Outcome
    reason: str


Answer: TypeAlias = "Reply | NoAnswer"

LANES = 2
"""Connections over which a call gets large values."""

LANES_FROM_BYTES = 1 << 19
"""From this many bytes of values on; for fewer, a second connection costs more than it gives."""

SPARE_RETRY_S = 10.0
"""How long a server that would not give a second connection is not asked for one."""

_PING = RedisRequest((command(b"PING"),), (str,))


class Server:
    """Connections to one server. Any number of threads may ask at once; `limit` are served, others wait.

    A connection goes back only when everything sent over it was answered and nothing else came;
    else it is closed. `num_open = len(idle) + those that a thread has`, and `num_open <= limit`.
    """

    def __init__(self, connect: Callable[[float], Link], limit: int) -> None:
        self._connect = connect
        self._limit = limit
        self._changed = threading.Condition()
        self._idle: list[Link] = []
        self._num_open = 0
        self._is_closed = False
        self._spare_from = float("-inf")
        self._process = os.getpid()

    def ask(self, requests: Sequence[RedisRequest], deadline: float) -> list[Answer]:
        """Return an answer for each request; after a failure, `NoAnswer` for all that follow it."""
        answers: list[Reply] = []
        try:
            while len(answers) < len(requests):
                self._ask_over_some(requests, deadline, answers)
        except TimeoutError:
            lost = NoAnswer(Outcome.TIMEOUT, "no answer in time")
        except (TierError, OSError) as error:
            lost = NoAnswer(Outcome.ERROR, str(error))
        else:
            return [*answers]
        return [*answers, *[lost] * (len(requests) - len(answers))]

    def open(self, deadline: float) -> None:
        """Make sure that there is a connection. Raises what `connect` raises."""
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

    def _ask_over_some(
        self, requests: Sequence[RedisRequest], deadline: float, answers: list[Reply]
    ) -> None:
        # What was answered before a failure stays answered.
        rest = requests[len(answers) :]
        links = [self._take(deadline)]
        try:
            for _ in range(1, _num_lanes(rest)):
                links += self._take_spare(deadline)
            exchange(links, rest, deadline, answers)
        except BaseException:
            for link in links:
                self._drop(link)
            raise
        for link in links:
            self._give_back(link)

    def _take(self, deadline: float) -> Link:
        with self._changed:
            while True:
                if self._is_closed:
                    raise TierError("the tier is closed")
                self._leave_parent()
                link = self._take_idle()
                if link is not None:
                    return link
                if self._num_open < self._limit:
                    self._num_open += 1
                    break
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
        return self._connect_one(deadline)

    def _take_spare(self, deadline: float) -> list[Link]:
        """Return one more connection; none where more than half would be taken, or where no other can be made.

        So a thread that has none yet waits for those that have two only where others have the rest.
        """
        now = time.monotonic()
        with self._changed:
            num_taken = self._num_open - len(self._idle)
            if self._is_closed or 2 * (num_taken + 1) > self._limit:
                return []
            link = self._take_idle()
            if link is not None:
                return [link]
            if now < self._spare_from:
                return []
            self._num_open += 1
        try:
            return [self._connect_spare(now + (deadline - now) / 4)]
        except (TierError, OSError):
            self._spare_from = time.monotonic() + SPARE_RETRY_S
            return []

    def _connect_spare(self, deadline: float) -> Link:
        """Return a connection that has answered: a server with too many clients takes and then ends it."""
        link = self._connect_one(deadline)
        answers: list[Reply] = []
        try:
            exchange([link], [_PING], deadline, answers)
        except BaseException:
            self._drop(link)
            raise
        if answers != ["PONG"]:
            self._drop(link)
            raise TierError(f"PING was answered with {answers!r:.80}")
        return link

    def _take_idle(self) -> Link | None:
        while self._idle:
            link = self._idle.pop()
            if link.is_quiet:
                return link
            link.close()
            self._num_open -= 1
        return None

    def _connect_one(self, deadline: float) -> Link:
        try:
            return self._connect(deadline)
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


def _num_lanes(requests: Sequence[RedisRequest]) -> int:
    """Return over how many connections to ask: several only for values that may come in any order."""
    num_bytes = 0
    for each in requests:
        if each.into is None:
            return 1
        num_bytes += len(each.into)
    return min(LANES, len(requests)) if num_bytes >= LANES_FROM_BYTES else 1
