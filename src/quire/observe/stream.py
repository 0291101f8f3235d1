"""A manager's events as a numbered stream of batches, of which the last are kept."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable

from quire.config import check_count
from quire.core import CacheManager
from quire.errors import ConfigError
from quire.exchange.events import EventLog
from quire.exchange.wire import ClearedEvent, EventBatch, encode_batch
from quire.observe.follower import LIFE_BITS, Message, count_of
from quire.observe.mirror import Mirror
from quire.observe.telling import Telling

MAX_EVENTS = 1000
"""Events in one batch."""

LAST_COUNT = (1 << LIFE_BITS) - (1 << 20)
"""Batches of one life, less than could come at once."""


class BatchStream:
    """The events of a manager's `EventLog` as numbered batches; no sockets, one thread.

    max_batches  that are kept for replay
    clock        seconds since the epoch; batches have rising times
    life         a number above 0 that no other stream has, drawn where none is given: numbers begin at `life << 32`, so that
                 followers know a restart

    It takes the events out of the log: nobody else may. Raises `ConfigError` for a manager without a log.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_batches: int = 10_000,
        clock: Callable[[], float] = time.time,
        life: int | None = None,
    ) -> None:
        log = manager.kernel.watchers.find(EventLog)
        if log is None:
            raise ConfigError(
                "the manager tells no events: CacheManager(..., watchers=[EventLog()])"
            )
        self._log, self._telling, self._clock = log, Telling(manager), clock
        self._kept: deque[Message] = deque(maxlen=check_count("max_batches", max_batches))
        self._mirror = Mirror()
        self._num_dropped = 0
        self._is_whole, self._is_described = True, False
        self._last_s = 0.0
        self.next_number = (life or _new_life()) << LIFE_BITS

    def take(self) -> list[Message]:
        """Return the events since the last call. Where the log dropped events, a number is left out."""
        if (
            count_of(self.next_number) > LAST_COUNT
        ):  # another life, whose first batch nobody gets: the cache is not empty
            self.next_number = (_new_life() << LIFE_BITS) + 1
        events = self._telling.told(self._log.take())
        if events and not self._is_described:
            self._is_described = True
            events = self._telling.described() + events
        if self._log.num_dropped != self._num_dropped:
            self._num_dropped = self._log.num_dropped
            self.next_number += 1
            self._is_whole = False
        messages: list[Message] = []
        for start in range(0, len(events), MAX_EVENTS):
            some = events[start : start + MAX_EVENTS]
            self._last_s = max(self._clock(), self._last_s + 1e-6)
            batch = EventBatch(self._last_s, some, 0)
            self._mirror.receive(batch)
            self._is_whole |= any(isinstance(event, ClearedEvent) for event in some)
            messages.append((self.next_number, encode_batch(batch)))
            self.next_number += 1
        self._kept += messages
        return messages

    def replay(self, start: int) -> list[Message]:
        """Return the batches from a number on that are kept."""
        return [message for message in self._kept if message[0] >= start]

    def snapshot(self) -> list[Message]:
        """Return batches that say what is cached, all of the number that comes next; none where events were dropped."""
        if not self._is_whole:
            return []
        self._last_s = max(self._clock(), self._last_s)
        events = self._mirror.events()
        starts = range(0, max(len(events), 1), MAX_EVENTS)
        parts = [EventBatch(self._last_s, events[at : at + MAX_EVENTS], 0) for at in starts]
        return [(self.next_number, encode_batch(part)) for part in parts]


def _new_life() -> int:
    return 1 + secrets.randbelow((1 << 31) - 1)
