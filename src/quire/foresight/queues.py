"""The order of the policy `learned`: cached nodes in queues by the class of their record, oldest first in each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from quire.core.node import Node
from quire.core.policy import ENDLESS, Capacity, Entry, LazyHeap, Policy, Tick
from quire.foresight.mind import Mind
from quire.foresight.reentry import Record

SUPERSEDED, BEYOND, FIRST_CLASS = range(3)
"""Queues: what another request has gone on from, what follows prompts, then the classes."""


class Queues(Policy):
    """Evicts what is superseded, then answers that are trimmed, then the head of the class of the lowest rank.

    An entry's `note` is the record of the request that used it last, its `uses` its age. A queue is a heap
    by age. An entry in it may have gone, or belong in another queue since a later turn went on from it:
    that is seen when it comes to the front. `_fronts` holds rank, age and entry of the first of each
    class, `_front_of` its queue by the entry's id; `_doubtful` names the queues to look at again.
    """

    def __init__(self, tick: Tick, capacity: Capacity, mind: Mind) -> None:
        super().__init__(tick, capacity)
        self._mind = mind
        mind.doubts.append(self._doubt)
        mind.exposures.append(self._expose)
        self._heaps: dict[int, LazyHeap[tuple[float, int, Entry]]] = {}
        self._held: dict[int, Entry] = {}
        self._fronts: dict[int, tuple[float, float, Entry]] = {}
        self._front_of: dict[int, int] = {}
        self._doubtful: dict[int, None] = {}
        self._ranked = (0.0, 0)

    def touched(self, entry: Entry) -> None:
        assert isinstance(entry, Node)
        self._mind.touched(entry)

    def released(self, entry: Entry) -> None:
        if entry.note is None:  # of a request that pauses, or brought here by none
            entry.note = Record(time=self._mind.now)
        entry.uses = self.tick()
        self.returned(entry)

    def returned(self, entry: Entry) -> None:
        self._held[id(entry)] = entry
        if entry.evictable:
            self._push(entry)

    def referenced(self, entry: Entry) -> None:
        del self._held[id(entry)]
        queue = self._front_of.get(id(entry))
        if queue is not None:
            self._doubt(queue - FIRST_CLASS)

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def split(self, upper: Entry, lower: Entry) -> None:
        self._held[id(upper)] = upper

    def victim(self) -> tuple[Entry, int] | None:
        if self._mind.is_lru:
            heads = [self._head(queue) for queue in list(self._heaps)]
            oldest = min((head for head in heads if head is not None), key=_age, default=None)
            return (oldest, ENDLESS) if oldest is not None else None
        self._look()
        head = self._head(SUPERSEDED)
        if head is not None:
            return head, ENDLESS
        head = self._head(BEYOND)
        if head is not None:
            return head, head.end - _record(head).prompt
        return (min(self._fronts.values())[2], ENDLESS) if self._fronts else None

    def order(self) -> Iterator[Entry]:
        held: dict[int, Entry] = {}
        for heap in self._heaps.values():
            for pair in heap.items:
                if self._holds(pair):
                    held[id(pair[2])] = pair[2]
        if self._mind.is_lru:
            yield from sorted(held.values(), key=_age)
        else:
            yield from sorted(
                held.values(), key=lambda e: (min(self._queue(e), FIRST_CLASS), self._rank(e))
            )

    def _rank(self, entry: Entry) -> tuple[float, float]:
        mind = self._mind
        return mind.model.rank_of(_record(entry), mind.now), _age(entry)

    def _queue(self, entry: Entry) -> int:
        record = _record(entry)
        if record.superseded:
            return SUPERSEDED
        if record.trimmed and entry.end > record.prompt:
            return BEYOND
        return FIRST_CLASS + record.kind

    def _look(self) -> None:
        """Bring the fronts of all classes up to date."""
        mind, fronts = self._mind, self._fronts
        ranked = (mind.now, mind.model.moves)
        if ranked != self._ranked:
            self._ranked = ranked
            for queue, (_, age, entry) in fronts.items():
                fronts[queue] = (self._rank(entry)[0], age, entry)
        while self._doubtful:
            queue, _ = self._doubtful.popitem()
            head = self._head(queue)
            if head is not None:
                fronts[queue] = (*self._rank(head), head)
                self._front_of[id(head)] = queue

    def _expose(self, entry: Entry) -> None:
        """An entry may belong in another queue than before."""
        if id(entry) in self._held and entry.evictable:
            self._push(entry)

    def _doubt(self, kind: int) -> None:
        """The front of a class may not be what it was."""
        queue = FIRST_CLASS + kind
        front = self._fronts.pop(queue, None)
        if front is not None:
            del self._front_of[id(front[2])]
        self._doubtful[queue] = None

    def _push(self, entry: Entry) -> None:
        queue = self._queue(entry)
        if queue not in self._heaps:
            self._heaps[queue] = LazyHeap(self._holds)
        self._heaps[queue].push((_age(entry), self.tick(), entry))
        front = self._fronts.get(queue)
        if queue >= FIRST_CLASS and (front is None or _age(entry) <= front[1]):
            self._doubt(queue - FIRST_CLASS)

    def _head(self, queue: int) -> Entry | None:
        """Return the oldest entry of a queue; drop what no longer belongs there."""
        heap = self._heaps.get(queue)
        while heap is not None and (first := heap.first()) is not None:
            entry = first[2]
            if self._queue(entry) == queue:
                return entry
            heapq.heappop(heap.items)
            self._push(entry)
        return None

    def _holds(self, pair: tuple[float, int, Entry]) -> bool:
        """Whether a pair is up to date but for the queue that its entry belongs in."""
        age, _, entry = pair
        return id(entry) in self._held and entry.uses == age and entry.evictable


def _age(entry: Entry) -> float:
    return entry.uses


def _record(entry: Entry) -> Record:
    """Return the record of a cached entry, which has one since its first release."""
    record = entry.note
    assert isinstance(record, Record)
    return record
