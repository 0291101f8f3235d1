"""The order of the policy `learned`: cached nodes in queues by the class of their record, oldest first in each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf
from typing import TypeAlias

from quire.core.node import Node
from quire.core.policies import Lru
from quire.core.policy import ENDLESS, Capacity, Entry, Tick
from quire.foresight.forecasts import BELIEVED
from quire.foresight.learned_state import LearnedState
from quire.foresight.reentry import NUM_CLASSES, Record, SharedRoot
from quire.heaps import LazyHeap

SUPERSEDED, BEYOND, AWAITED, FIRST_CLASS = range(4)
"""Queues: what another request has gone on from, what follows prompts, what callers come back to, then the classes."""

NUM_QUEUES = FIRST_CLASS + 2 * NUM_CLASSES
"""The classes are those of requests and those of what these share."""


Item: TypeAlias = tuple[float, float, int, Entry]
"""What the queue goes by, lowest first; the age of the entry; a number; the entry."""


class Queues(Lru):
    """Evicts superseded blocks, then trimmed answers, then the lowest rank; or in LRU's order.

    Of what callers have said when they come back to, that is what is expected last; of the rest, the head of a class.
    An entry's `note` is the record of the request that used it last, its `uses` its age. A queue is a heap
    by age. An entry in it may have gone, or belong in another queue since a later turn went on from it:
    that is seen when it comes to the front. `_fronts` holds rank, age and entry of the first of each
    class, `_front_of` its queue by the entry's id, `_until` until when it has that rank and `_next` the first of these;
    `_doubtful` names the queues to look at again.
    """

    def __init__(self, tick: Tick, capacity: Capacity, mind: LearnedState) -> None:
        super().__init__(tick, capacity)
        self._mind = mind
        mind.doubts.append(self._doubt)
        mind.exposures.append(self._expose)
        self._heaps = [LazyHeap[Item](self._holds) for _ in range(NUM_QUEUES)]
        self._lasts = LazyHeap[Item](self._holds)
        self._held: set[int] = set()
        self._fronts: dict[int, tuple[float, float, Entry]] = {}
        self._front_of: dict[int, int] = {}
        self._doubtful: dict[int, None] = {}
        self._until: dict[int, float] = {}
        self._next, self._moves = inf, 0

    def touched(self, entry: Entry) -> None:
        assert isinstance(entry, Node)
        self._mind.touched(entry)

    def released(self, entry: Entry) -> None:
        if entry.note is None:  # of a request that pauses, or brought here by none
            entry.note = Record(time=self._mind.now)
        Lru.released(self, entry)
        self._held.add(id(entry))
        if entry.evictable:
            self._push(entry)

    def returned(self, entry: Entry) -> None:
        super().returned(entry)
        self._held.add(id(entry))
        if entry.evictable:
            self._push(entry)

    def referenced(self, entry: Entry) -> None:
        Lru.referenced(self, entry)
        self._held.remove(id(entry))
        queue = self._front_of.get(id(entry))
        if queue is not None:
            self._look_again(queue)

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        super().split(upper, lower)
        self._held.add(id(upper))

    def victim(self) -> tuple[Entry, int] | None:
        if self._mind.is_lru:
            return super().victim()
        heaps = self._heaps
        # First what follows prompts: what was gone on from since stands in the next one.
        beyond = self._head(BEYOND) if heaps[BEYOND].items else None
        superseded = self._head(SUPERSEDED) if heaps[SUPERSEDED].items else None
        if superseded is not None:
            return superseded, ENDLESS
        if beyond is not None:
            return beyond, beyond.end - _record(beyond).prompt
        awaited = self._look()
        superseded = self._head(SUPERSEDED) if heaps[SUPERSEDED].items else None
        if superseded is not None:
            return superseded, ENDLESS
        front = min(self._fronts.values(), default=None)
        if awaited is not None and (front is None or self._rank(awaited)[0] <= front[0]):
            return awaited, ENDLESS
        if front is None:
            return None
        entry = front[2]
        num_blocks = _num_alike(entry)
        if num_blocks < entry.num_blocks:  # what is left of it will be of another class
            self._look_again(self._front_of[id(entry)])
        return entry, num_blocks

    def order(self) -> Iterator[Entry]:
        if self._mind.is_lru:
            return super().order()
        ends = [entry for entry in super().order() if entry.evictable]
        ends.sort(key=lambda e: (min(self._queue(e), FIRST_CLASS), self._rank(e)[0], e.uses))
        return iter(ends)

    def _rank(self, entry: Entry) -> tuple[float, float]:
        """Return the rank of an entry, and until when it has that."""
        mind, record = self._mind, _record(entry)
        if record.forecast is not None and self._queue(entry) == AWAITED:
            return record.forecast.rank(mind.now), mind.now
        shared = _shared(entry, record)
        if shared is not None:
            return mind.shared.rank_of(shared.stay, mind.now)
        return mind.model.rank_of(record, mind.now)

    def _queue(self, entry: Entry) -> int:
        record: Record = entry.note
        shared = _shared(entry, record)
        if shared is None:
            if record.superseded:
                return SUPERSEDED
            if record.trimmed and entry.end > record.prompt:
                return BEYOND
        forecast = record.forecast
        foreseen = forecast is not None or record.finished
        if foreseen and entry.end > record.since and not self._mind.is_lru:
            if record.finished:
                return SUPERSEDED
            if forecast is not None and forecast.trust >= BELIEVED:
                return AWAITED
        return FIRST_CLASS + (record.kind if shared is None else shared.stay.kind)

    def _look(self) -> Entry | None:
        """Bring the fronts of all classes up to date; return what is awaited last."""
        mind, fronts = self._mind, self._fronts
        moves = mind.model.moves + mind.shared.moves
        if moves != self._moves:
            self._doubtful.update(dict.fromkeys(fronts))
            fronts.clear()
            self._front_of.clear()
            self._until.clear()
            self._moves, self._next = moves, inf
        elif mind.now >= self._next:
            for queue in [queue for queue, end in self._until.items() if end <= mind.now]:
                self._look_again(queue)
            self._next = min(self._until.values(), default=inf)
        if self._lasts.items:
            while (first := self._lasts.first()) is not None and first[0] < mind.now:
                heapq.heappop(self._lasts.items)
                self._push(first[3])
            self._head(AWAITED)  # which may put others back into their classes
        while self._doubtful:
            queue, _ = self._doubtful.popitem()
            head = self._head(queue)
            if head is not None:
                rank, end = self._rank(head)
                fronts[queue] = (rank, head.uses, head)
                self._until[queue] = end
                self._next = min(self._next, end)
                self._front_of[id(head)] = queue
        return self._head(AWAITED) if self._lasts.items else None

    def _expose(self, entry: Entry) -> None:
        """An entry may belong in another queue than before."""
        if id(entry) in self._held and entry.evictable:
            self._push(entry)

    def _doubt(self, record: Record) -> None:
        """Check the front of a record's class again, since the record changes."""
        queue = FIRST_CLASS + record.kind
        front = self._fronts.get(queue)
        if front is not None and front[2].note is record:
            self._look_again(queue)

    def _look_again(self, queue: int) -> None:
        """Mark the front of a queue as out of date."""
        front = self._fronts.pop(queue, None)
        if front is not None:
            del self._front_of[id(front[2])], self._until[queue]
        self._doubtful[queue] = None

    def _push(self, entry: Entry) -> None:
        queue, age = self._queue(entry), entry.uses
        if queue == AWAITED and (forecast := _record(entry).forecast) is not None:
            self._heaps[queue].push((-forecast.held_for, age, self.tick(), entry))
            self._lasts.push((forecast.last, age, self.tick(), entry))
            return
        self._heaps[queue].push((age, age, self.tick(), entry))
        if queue >= FIRST_CLASS:
            front = self._fronts.get(queue)
            if front is None or age <= front[1]:
                self._look_again(queue)

    def _head(self, queue: int) -> Entry | None:
        """Return the oldest entry of a queue; drop entries that belong elsewhere."""
        items = self._heaps[queue].items
        while items:
            entry = items[0][3]
            holds = self._holds(items[0])
            if holds and self._queue(entry) == queue:
                return entry
            heapq.heappop(items)
            if holds:
                self._push(entry)
        return None

    def _holds(self, item: Item) -> bool:
        """Whether an item is up to date but for the queue that its entry belongs in."""
        entry = item[3]
        return entry.uses == item[1] and id(entry) in self._held and entry.evictable


def _shared(entry: Entry, record: Record) -> SharedRoot | None:
    """Return the uppermost of the shared runs of a request that has an entry's last block."""
    found, run, end = None, record.shared, entry.end
    if run is None or run.end < end or record.foretold or record.silent or record.spent:
        return None
    while run is not None and run.end >= end:
        found, run = run, run.above
    return found


def _runs(record: Record) -> SharedRoot | None:
    """Return the deepest shared run of a request; None where its caller speaks of the future, whose word counts for all of it."""
    return None if record.foretold or record.silent or record.spent else record.shared


def _num_alike(entry: Entry) -> int:
    """Return how many of an entry's last blocks belong to the run that its last block belongs to."""
    run, end = _runs(_record(entry)), entry.end
    while run is not None and run.end >= end:
        run = run.above
    return end - run.end if run is not None else ENDLESS


def _record(entry: Entry) -> Record:
    """Return the record of a cached entry, which has one since its first release."""
    record = entry.note
    assert isinstance(record, Record)
    return record
