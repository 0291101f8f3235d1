"""Following a numbered stream of batches that may be lost, doubled, late, or begin anew."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Literal, Protocol, TypeAlias

from quire.errors import RecordError
from quire.exchange.wire import ClearedEvent, EventBatch, decode_batch

MAX_AHEAD = 10_000
"""Batches behind a gap that are kept while the gap is asked for; as many as publishers keep for replay."""

LIFE_BITS = 32
"""A number of quire's own stream is a life of its publisher, and below it so many bits that count batches."""

Message: TypeAlias = tuple[int, bytes]
"""The number of a batch, and the batch as it was published."""

Wish: TypeAlias = Literal["snapshot", "replay"]


class Consumer(Protocol):
    """A receiver of a cache's events, for instance a `Mirror`."""

    def receive(self, batch: EventBatch) -> None:
        """Take in the events of a batch."""
        ...

    def begin(self, batches: Items[EventBatch]) -> None:
        """Replace the known contents by those of these batches."""
        ...


class Follower:
    """Hands the batches of one publisher to a consumer, each once and in order.

    It knows no sockets: `receive` takes what was published, and where there is a `wish`, whoever has the sockets asks
    for a snapshot, or for a replay from `replay_from` on, and gives the answer to `restore` or `refill`; `skip` where
    neither is to be had. A wish stays until it is met.

    The number of a batch of quire's tells the life of its publisher, so that a restart is seen at the next batch. Numbers
    of other engines begin at 0 in every life. For these a gap, a time that steps back, another batch of an old number and
    a broken connection are doubts: the publisher is the same if it replays the last batch that was taken, byte for byte.
    A restart whose next batch has just the next number is told by the broken connection alone. A follower that sees no
    connections (`sees_breaks` False) is degraded as long as its publisher tells no life.

    `next_number`  of the batch that is to come; None before it is known
    `ahead`        batches that came early, by their numbers
    `unsure`       whether the publisher may be another one than before
    `lost`         whether something is missing for good, until everything is cleared
    `num_gaps`, `num_doubled`, `num_unreadable`, `num_restarts`  what went wrong so far

        is_degraded == (next_number is None or ahead or unsure or lost or is_blind)
    """

    def __init__(self, consumer: Consumer, *, sees_breaks: bool = True) -> None:
        self.consumer = consumer
        self.next_number: int | None = None
        self.ahead: dict[int, tuple[EventBatch, bytes]] = {}
        self.wish: Wish | None = "snapshot"
        self.unsure = self.lost = False
        self.num_gaps = self.num_doubled = self.num_unreadable = self.num_restarts = 0
        self._sees_breaks = sees_breaks
        self._marks: dict[int, bytes] = {}
        self._newest_s = -math.inf
        self._past: dict[int, None] = {}
        self._is_fresh = True
        self._is_alone = False

    @property
    def is_degraded(self) -> bool:
        """Whether the consumer's contents may differ from the cache's."""
        return (
            self.next_number is None
            or bool(self.ahead)
            or self.unsure
            or self.lost
            or self.is_blind
        )

    @property
    def is_blind(self) -> bool:
        """Whether a restart could go unseen: neither numbers nor connections tell of it."""
        return not self._sees_breaks and not life_of(self.next_number or 0)

    @property
    def replay_from(self) -> int:
        """The number of the first batch to replay: the last known one, if there is one."""
        number = self.next_number or 0
        return number - bool(count_of(number))

    def receive(self, message: Message) -> None:
        """Take a batch as it was published."""
        number, payload = message
        life = life_of(number)
        if life in self._past:
            self.num_doubled += 1  # on its way since before the publisher began anew
            return
        try:
            batch = decode_batch(payload)
        except RecordError:
            self.num_unreadable += 1  # as if it had been lost
            return
        if self.next_number is not None and life != life_of(self.next_number):
            self._begin_anew()
        if self.unsure and self._is_alone and life:
            self.unsure = False  # it is still there, and nobody can be asked
            self.wish = "replay" if self.ahead else None
        is_begin = not count_of(number) and (life or (self._is_fresh and not self.ahead))
        if self.next_number is None and is_begin:
            self._start(number)
        early = batch, _mark(payload)
        if self.next_number is None or self.unsure:
            self._keep(number, *early)
        elif number < self.next_number:
            self._recall(number, *early)
        elif number == self.next_number and (life or batch.time_s >= self._newest_s):
            self._take(*early)
            self._catch_up()
        else:
            if not self.ahead and self.wish is None:
                self.num_gaps += number > self.next_number
                self.wish = "replay"
            self.unsure |= not life
            self._keep(number, *early)

    def refill(self, messages: Iterable[Message]) -> None:
        """Take the answer to a replay from `replay_from` on. Where the wish stays, it had not all that is missing."""
        is_whole = not count_of(self.replay_from)
        replayed = sorted(messages)
        self._is_alone = False
        self._recognise(replayed)
        if self.next_number is None and is_whole and not (replayed or self.ahead):
            self._start(0)  # nothing was ever published
        if not life_of(replayed[-1][0] if replayed else self.next_number or 0):
            self.ahead.clear()  # the answer has them, or they are another publisher's
        for number, payload in replayed:
            if self.next_number is None and not count_of(number):
                self._start(number)
            if self.next_number is None or number >= self.next_number:
                self._take_replayed(number, payload)
        self._catch_up()

    def restore(self, next_number: int, batches: Iterable[bytes]) -> None:
        """Take a snapshot of the contents before the batch of this number. Raises `RecordError`."""
        decoded = [decode_batch(payload) for payload in batches]
        self._is_alone = False
        life = life_of(next_number)
        if self.next_number is not None and life != life_of(self.next_number):
            self._begin_anew()
        if not life:
            self.ahead.clear()  # they may be another publisher's
        self._start(next_number, decoded)
        self._newest_s = max((batch.time_s for batch in decoded), default=-math.inf)
        self._catch_up()

    def skip(self) -> None:
        """Continue without an answer: behind batches that are lost for good, or in doubt until a batch tells its life."""
        self._is_alone = True
        if self.unsure and life_of(self.next_number or 0):
            return
        if self.ahead or self.unsure:
            self.unsure = False
            self.next_number = min(self.ahead, default=self.next_number)
            self._catch_up()
            self.lost = (
                True  # also where they cleared everything: they may be of several publishers
            )

    def doubt(self) -> None:
        """The connection broke: the publisher that is there now may have begun anew."""
        self.ahead = {number: each for number, each in self.ahead.items() if life_of(number)}
        self._is_fresh = False  # what comes may be of several publishers
        if self.next_number is not None:
            self.unsure, self.wish = True, self.wish or "replay"

    def _keep(self, number: int, batch: EventBatch, mark: bytes) -> None:
        """Keep a batch until those before it are there."""
        self.ahead[number] = batch, mark
        if len(self.ahead) > MAX_AHEAD:
            self.skip()

    def _recall(self, number: int, batch: EventBatch, mark: bytes) -> None:
        """Take a batch of an old number: doubled, or of a publisher that began anew and tells no life."""
        known = self._marks.get(number)
        if life_of(number) or known == mark:
            self.num_doubled += 1
        elif known is None:
            self.doubt()
        else:
            self._begin_anew()
            self._keep(number, batch, mark)

    def _take_replayed(self, number: int, payload: bytes) -> None:
        try:
            early = decode_batch(payload), _mark(payload)
        except RecordError:
            self.num_unreadable += 1
            return
        if number == self.next_number:
            self._take(*early)
        else:
            self._keep(number, *early)

    def _start(self, next_number: int, cached: Items[EventBatch] = ()) -> None:
        """Begin before this number, with what was cached then."""
        life = life_of(next_number)
        self._past.pop(life, None)
        self.ahead = {at: each for at, each in self.ahead.items() if life_of(at) == life}
        self.consumer.begin(cached)
        self.next_number = next_number
        self.unsure = self.lost = False
        self._newest_s = -math.inf
        self._marks.clear()

    def _begin_anew(self) -> None:
        """Another publisher is there: nothing is known of its cache."""
        if self.next_number is not None and life_of(self.next_number):
            self._past[life_of(self.next_number)] = None
        self.num_restarts += 1
        self.consumer.begin(())
        self.ahead.clear()
        self._marks.clear()
        self.next_number, self.wish = None, "snapshot"
        self.unsure = self.lost = self._is_fresh = False

    def _recognise(self, replayed: list[Message]) -> None:
        """See by a replay from the last batch that is known whether the publisher is the one that sent it."""
        number = self.next_number
        if number is None:
            return
        if life_of(number):
            is_same = life_of(replayed[0][0]) == life_of(number) if replayed else not self.unsure
        elif not count_of(number):
            is_same = not replayed or not life_of(replayed[0][0])
        else:
            known, first = self._marks.get(number - 1), replayed[:1]
            is_same = [(at, _mark(payload)) for at, payload in first] == [(number - 1, known)]
            is_same |= known is None and not self.unsure
        if is_same:
            self.unsure = False
        else:
            self._begin_anew()

    def _take(self, batch: EventBatch, mark: bytes) -> None:
        assert self.next_number is not None
        self._marks[self.next_number] = mark
        self._marks.pop(self.next_number - MAX_AHEAD, None)
        self._newest_s = max(self._newest_s, batch.time_s)
        self.next_number += 1
        self.consumer.receive(batch)
        if any(isinstance(event, ClearedEvent) for event in batch.events):
            self.lost = False

    def _catch_up(self) -> None:
        """Take what came early and is next."""
        if self.next_number is None or self.unsure:
            return
        for number in sorted(self.ahead):
            if number <= self.next_number:
                early = self.ahead.pop(number)
                if number == self.next_number:
                    self._take(*early)
        self.wish = (self.wish or "replay") if self.ahead else None


def life_of(number: int) -> int:
    """Return the life of the publisher that a number tells; 0 for an engine that tells none."""
    return number >> LIFE_BITS


def count_of(number: int) -> int:
    """Return how many batches of its life a batch comes after."""
    return number & ((1 << LIFE_BITS) - 1)


def _mark(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()
