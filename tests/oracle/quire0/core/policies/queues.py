"""What policies of several queues share: the queues, and the names of what went out of them."""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import ClassVar

from quire0.core.policies.base import Capacity, Entry, Policy, Tick


class QueuedPolicy(Policy):
    """A policy whose cached entries stand in queues, each in the order of their places.

    `entry.queue` says in which one, `entry.rank` holds the place (a tick; subclasses set it), and
    `entry.note` the tick of the last time that it entered, None while it is referenced. A
    queue is a heap of (place, tick of entering, entry), where a pair counts only if its tick is
    the entry's note: a push for each release, and stale pairs are dropped when they come up,
    or all at once when they outnumber the rest.

    `interior`   the queues in whose heaps entries with others below them stand too; in the rest
                 they enter when they are exposed, which is the leaf rule

    Invariant: `sizes[q]` is the sum of `num_blocks` over the cached entries of queue q.
    """

    remembers = True
    interior: ClassVar[tuple[int, ...]] = ()
    num_queues: ClassVar[int] = 2

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self.sizes = [0] * self.num_queues
        self._heaps: list[list[tuple[float, int, Entry]]] = [[] for _ in self.sizes]
        self._num_cached = 0

    def released(self, entry: Entry) -> None:
        self._num_cached += 1
        self.sizes[entry.queue] += entry.num_blocks
        if entry.queue in self.interior or entry.evictable:
            self._push(entry)

    def returned(self, entry: Entry) -> None:
        QueuedPolicy.released(self, entry)

    def referenced(self, entry: Entry) -> None:
        self._num_cached -= 1
        self.sizes[entry.queue] -= entry.num_blocks
        entry.note = None

    def exposed(self, entry: Entry) -> None:
        if entry.queue not in self.interior:
            self._push(entry)

    def extendable(self, entry: Entry) -> bool:  # noqa: ARG002 - what one request stored has one history
        return False

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        return upper.rank == lower.rank and super().joinable(upper, lower)

    def split(self, upper: Entry, lower: Entry) -> None:  # noqa: ARG002 - its blocks stay counted
        self._num_cached += 1
        if upper.queue in self.interior:
            self._push(upper)

    def evicting(self, entry: Entry, num_blocks: int) -> None:
        if num_blocks < entry.num_blocks:
            self.sizes[entry.queue] -= num_blocks

    def order(self) -> Iterator[Entry]:
        for queue, heap in enumerate(self._heaps):
            for pair in sorted(heap, key=lambda pair: pair[:2]):
                if self._counts(pair, queue) and pair[2].evictable:
                    yield pair[2]

    def first(self, queue: int) -> Entry | None:
        """Return the entry at the front of a queue, or None."""
        heap = self._heaps[queue]
        while heap:
            if self._counts(heap[0], queue):
                return heap[0][2]
            heapq.heappop(heap)
        return None

    def move(self, entry: Entry, queue: int) -> None:
        """Take a cached entry to its place in another queue, or to another place in this one."""
        num_blocks = entry.num_blocks
        self.sizes[entry.queue] -= num_blocks
        self.sizes[queue] += num_blocks
        entry.queue = queue
        if queue in self.interior or entry.evictable:
            self._push(entry)

    def _counts(self, pair: tuple[float, int, Entry], queue: int) -> bool:
        _, entered, entry = pair
        return entry.note == entered and entry.policy is self and entry.queue == queue

    def _push(self, entry: Entry) -> None:
        queue = entry.queue
        heap = self._heaps[queue]
        if len(heap) > 2 * self._num_cached + 64:
            heap[:] = [pair for pair in heap if self._counts(pair, queue)]
            heapq.heapify(heap)
        entry.note = entered = self.tick()
        heapq.heappush(heap, (entry.rank[0], entered, entry))


class Ghosts:
    """Names of evicted blocks, about 100 bytes each; the first ones to go are forgotten first."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def among(self, names: Iterable[int]) -> set[int]:
        """Return those of these names that are remembered."""
        return self._names.keys() & set(names)

    def add(self, names: Iterable[int]) -> None:
        """Remember names, the last one longest."""
        remembered = self._names
        for name in names:
            remembered.pop(name, None)
            remembered[name] = None

    def trim(self, limit: float) -> None:
        """Forget all but the last `limit` names."""
        for _ in range(len(self._names) - max(int(limit), 0)):
            self._names.popitem(last=False)

    def take(self, names: Iterable[int]) -> int:
        """Forget these names and return how many there were."""
        known = self.among(names)
        for name in names if known else ():
            self._names.pop(name, None)
        return len(known)


def lost(entry: Entry, num_blocks: int) -> array[int]:
    """Return the names of the last blocks of an entry, in the order in which they go."""
    return entry.names()[-num_blocks:][::-1]


def seam(names: array[int], *ghosts: Ghosts) -> int:
    """Return where the last stretch of a run starts that is all remembered, or all not."""
    known = frozenset[int]().union(*(each.among(names) for each in ghosts))
    at = len(names) - 1
    last = names[at] in known
    if not known or (last and len(known) == len(names)):
        return 0
    while at and (names[at - 1] in known) == last:
        at -= 1
    return at


def leaf(entry: Entry) -> Entry:
    """Return the entry to evict in place of one that others hang below: always the youngest one."""
    below = entry.below
    while below is not None:
        entry, below = below, below.below
    return entry
