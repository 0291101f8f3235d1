"""Following a numbered stream of batches that may be lost, doubled, late, or begin anew."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import Literal, Protocol, TypeAlias

from quire.errors import RecordError
from quire.exchange.wire import ClearedEvent, EventBatch, decode_batch

MAX_AHEAD = 10_000
"""Batches behind a gap that are kept while the gap is asked for; as many as publishers keep for replay."""

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
    neither is to be had. A wish stays until it is met. Times of batches have to rise, also from one publisher to the next.

    `next_number`  of the batch that is to come; None before it is known
    `ahead`        batches that came early, by their numbers
    `unsure`       whether the publisher may be another one than before
    `lost`         whether something is missing for good, until everything is cleared
    `num_gaps`, `num_doubled`, `num_unreadable`, `num_restarts`  what went wrong so far

        is_degraded == (next_number is None or ahead or unsure or lost)
    """

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.next_number: int | None = None
        self.ahead: dict[int, EventBatch] = {}
        self.wish: Wish | None = "snapshot"
        self.unsure = self.lost = False
        self.num_gaps = self.num_doubled = self.num_unreadable = self.num_restarts = 0
        self._times: dict[int, float] = {}
        self._newest_s = 0.0

    @property
    def is_degraded(self) -> bool:
        """Whether the consumer's contents may differ from the cache's."""
        return self.next_number is None or bool(self.ahead) or self.unsure or self.lost

    @property
    def replay_from(self) -> int:
        """The number of the first batch to replay; after a disconnect, that of a known batch."""
        return max((self.next_number or 0) - self.unsure, 0)

    def receive(self, message: Message) -> None:
        """Take a batch as it was published."""
        number, payload = message
        try:
            batch = decode_batch(payload)
        except RecordError:
            self.num_unreadable += 1  # as if it had been lost
            return
        if self.unsure:
            self._keep(number, batch)
            return
        if self.next_number is not None and number < self.next_number:
            if not self._is_of_another_life(number, batch):
                self.num_doubled += 1
                return
            self._begin_anew()
        if batch.time_s < self._newest_s:
            self.num_doubled += 1  # on its way since before the publisher began anew
            return
        if self.next_number is None and number == 0:
            self._start(0)
        if number == self.next_number:
            self._take(batch)
            self._catch_up()
            return
        if not self.ahead and self.wish is None:
            self.num_gaps += 1
            self.wish = "replay"
        self._keep(number, batch)

    def refill(self, messages: Iterable[Message]) -> None:
        """Take the answer to a replay. Where the wish stays, it had not all that is missing."""
        replayed = sorted(messages)
        if self.unsure:
            self._recognise(replayed)
        if self.next_number is None and not replayed and not self.ahead:
            self._start(0)  # nothing was ever published
        for number, payload in replayed:
            if self.next_number is None or number >= self.next_number:
                self.receive((number, payload))
        self._catch_up()

    def restore(self, next_number: int, batches: Iterable[bytes]) -> None:
        """Take a snapshot of the contents before the batch of this number. Raises `RecordError`."""
        decoded = [decode_batch(payload) for payload in batches]
        self._start(next_number, decoded)
        self._newest_s = max((batch.time_s for batch in decoded), default=self._newest_s)
        self._catch_up()

    def skip(self) -> None:
        """Continue behind batches that are lost for good."""
        if self.ahead:
            self.lost, self.unsure = True, False
            self.next_number = min(self.ahead)
            self._catch_up()

    def doubt(self) -> None:
        """The connection broke: the publisher that is there now may have begun anew."""
        self.unsure, self.wish = True, "replay"

    def _keep(self, number: int, batch: EventBatch) -> None:
        """Keep a batch until those before it are there."""
        self.ahead[number] = batch
        if len(self.ahead) > MAX_AHEAD:
            self.skip()

    def _start(self, next_number: int, cached: Items[EventBatch] = ()) -> None:
        """Begin before this number, with what was cached then."""
        self.consumer.begin(cached)
        self.next_number = next_number
        self.unsure = self.lost = False
        self._times.clear()

    def _begin_anew(self) -> None:
        """Another publisher is there, whose cache began empty."""
        self.num_restarts += 1
        self.consumer.begin(())
        self.ahead.clear()
        self._times.clear()
        self.next_number, self.wish = None, "snapshot"
        self.unsure = self.lost = False

    def _is_of_another_life(self, number: int, batch: EventBatch) -> bool:
        """Whether an old number stands for a new batch: not the one that had it, or newer than all that came."""
        known = self._times.get(number)
        return batch.time_s > self._newest_s if known is None else batch.time_s != known

    def _recognise(self, replayed: list[Message]) -> None:
        """See by the last batch that is known whether the publisher is the one that sent it."""
        for number, payload in replayed[:1]:
            if number == self.replay_from:
                self.unsure = False
                self.receive((number, payload))  # doubled, or of another life
                return
        self._begin_anew()

    def _take(self, batch: EventBatch) -> None:
        assert self.next_number is not None
        self._times[self.next_number] = batch.time_s
        self._times.pop(self.next_number - MAX_AHEAD, None)
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
            batch = self.ahead[number]
            if number <= self.next_number or batch.time_s < self._newest_s:
                del self.ahead[number]
            if number == self.next_number and batch.time_s >= self._newest_s:
                self._take(batch)
        if not self.ahead:
            self.wish = None
