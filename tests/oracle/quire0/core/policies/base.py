"""The interface between the cache and a policy, and the heap that most policies want."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

import msgspec

Tick: TypeAlias = Callable[[], int]
"""The logical counter: each call gives the next integer. Time, for a policy, is this alone."""


Capacity: TypeAlias = Callable[[], int]
"""Blocks of the pool as it is now; of several pools, of the smallest one."""


class Visit(msgspec.Struct, gc=False, eq=False):
    """One request as a policy may know it: when, and how many tokens; never which.

    `now`         seconds of the manager's clock; without a clock, requests opened so far
    `prompt`      tokens of its prompt
    `output`      tokens generated, known at its end
    `block_size`  tokens per block
    `note`        belongs to the policy
    """

    now: float
    prompt: int
    block_size: int
    output: int = 0
    note: object = None


class Entry(msgspec.Struct, gc=False, eq=False):
    """A run of cached blocks, as a policy sees it.

    `end` counts the blocks from the root to its end. `policy` is the one that holds the entry,
    or held it last; the other fields belong to it, and are copied when an entry is cut in two.
    A victim loses blocks from its tail, as many as are needed, and stays an entry while any
    are left.
    """

    end: int = 0
    older: Entry | None = None
    newer: Entry | None = None
    rank: tuple[float, ...] = ()
    uses: int = 0
    queue: int = 0
    note: object = None
    policy: Policy | None = None

    @property
    def evictable(self) -> bool:
        """Whether this may be a victim now: nobody references it, nothing hangs below it."""
        raise NotImplementedError  # the tree's node says, here and below

    @property
    def num_blocks(self) -> int:
        """Length of the run in blocks."""
        raise NotImplementedError

    @property
    def num_tokens(self) -> int:
        """Length of the run in tokens."""
        raise NotImplementedError

    @property
    def above(self) -> Entry | None:
        """The entry that this one continues; None at the root."""
        raise NotImplementedError

    @property
    def num_below(self) -> int:
        """How many entries continue this one."""
        raise NotImplementedError

    @property
    def below(self) -> Entry | None:
        """The youngest entry that continues this one; None for a leaf."""
        raise NotImplementedError

    def names(self) -> array[int]:
        """Return a 32-bit number for each block of the run, head first.

        It stands for all tokens from the root to the end of the block: what a policy may
        remember of blocks that are gone. Two prefixes may share one by chance; a policy that
        errs then evicts worse, and never wrongly. Chained CRC-32, computed when asked for.
        """
        raise NotImplementedError

    def name(self, index: int) -> int:
        """Return `names()[index]`, 0 for the first block of the run, without naming the others."""
        raise NotImplementedError


class Policy(ABC):
    """Decides which entry is evicted next. Sees events and entries, never tokens or the tree.

    Entries form chains: one is evictable only when nothing hangs below it. A use is reported
    from the deepest entry upwards, so a parent's last tick is never before its child's.

    `watches`    asks for `opened` and `closing`
    `remembers`  asks for `evicting` and `seam`
    """

    watches: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        self.tick = tick
        self.capacity = capacity

    def sibling(self) -> Policy | None:
        """Return a policy for another class of entries that shares what this one knows, if any."""
        return None

    def opened(self, visit: Visit, entry: Entry | None) -> None:  # noqa: B027 - few policies ask
        """A request found `entry`, the deepest (None: nothing); `touched` follows, entry by entry."""

    def closing(self, visit: Visit, entry: Entry | None) -> None:  # noqa: B027 - most policies ignore it
        """A request ends at `entry`, the deepest it stored or used; `added`, `released` follow."""

    def evicting(self, entry: Entry, num_blocks: int) -> None:  # noqa: B027 - most policies ignore it
        """The last blocks of a victim are about to go; `referenced` follows if all of them do."""

    def seam(self, entry: Entry) -> int:  # noqa: ARG002 - most policies cut nothing
        """Return how many blocks at the head of a stored run shall be an entry of their own.

        Asked when the last reference of a run that has grown is about to go; 0 for none.
        """
        return 0

    @abstractmethod
    def added(self, entry: Entry) -> None:
        """Blocks were stored in this entry since it was last cached; `released` follows."""

    @abstractmethod
    def touched(self, entry: Entry) -> None:
        """A request found this entry. It is referenced now, so it is no candidate."""

    @abstractmethod
    def released(self, entry: Entry) -> None:
        """The last reference to this entry went away: it is cached now."""

    @abstractmethod
    def returned(self, entry: Entry) -> None:
        """A cached entry comes from another class; its last use there still counts."""

    @abstractmethod
    def referenced(self, entry: Entry) -> None:
        """A cached entry got its first reference, or left the cache."""

    @abstractmethod
    def exposed(self, entry: Entry) -> None:
        """The last entry below this cached one went away: it may be a victim now."""

    def extendable(self, entry: Entry) -> bool:  # noqa: ARG002 - most policies need not look
        """Whether blocks that are stored now may join this entry's tail, sharing its history."""
        return True

    @abstractmethod
    def split(self, upper: Entry, lower: Entry) -> None:
        """A new cached entry took over the head of `lower`, with its rank and uses."""

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        """Whether `lower`, the only one below `upper`, may take over its run, and keeps its own rank and uses.

        Both are referenced, by the same requests, and the latest one has just used both.
        """
        alike = upper.queue == lower.queue and upper.uses == lower.uses
        return alike and upper.note is lower.note

    @abstractmethod
    def victim(self) -> Entry | None:
        """Return the evictable entry to evict next, or None.

        Asked when blocks have to go now: a policy may move its hand. Asked again, with nothing else
        in between, the answer is the same.
        """

    @abstractmethod
    def order(self) -> Iterator[Entry]:
        """Iterate over the cached entries that this policy holds, coldest first."""


class RankedPolicy(Policy):
    """A policy that evicts the evictable entry of the lowest rank, kept in a heap.

    The heap holds (rank, entry) pairs that may be out of date; a pair counts only if its
    entry is evictable, still has that rank, and is still this policy's. Ranks are unique: their last part is a tick.
    Each entry that becomes a candidate costs one push; stale pairs are dropped when popped,
    and all at once when they outnumber the rest.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._heap: list[tuple[tuple[float, ...], int, Entry]] = []
        self._num_cached = 0

    def released(self, entry: Entry) -> None:
        self._num_cached += 1
        if entry.evictable:
            self._push(entry)

    def returned(self, entry: Entry) -> None:
        self.released(entry)

    def referenced(self, entry: Entry) -> None:  # noqa: ARG002 - stale pairs are seen when popped
        self._num_cached -= 1

    def exposed(self, entry: Entry) -> None:
        self._push(entry)

    def split(self, upper: Entry, lower: Entry) -> None:  # noqa: ARG002 - not a leaf: no candidate
        self._num_cached += 1

    def victim(self) -> Entry | None:
        heap = self._heap
        while heap:
            rank, _, entry = heap[0]
            if self._counts(entry, rank):
                return entry
            heapq.heappop(heap)
        return None

    def order(self) -> Iterator[Entry]:
        seen: set[int] = set()
        for rank, _, entry in sorted(self._heap, key=lambda pair: pair[:2]):
            if self._counts(entry, rank) and id(entry) not in seen:
                seen.add(id(entry))
                yield entry

    def _counts(self, entry: Entry, rank: tuple[float, ...]) -> bool:
        return entry.policy is self and entry.rank == rank and entry.evictable

    def _push(self, entry: Entry) -> None:
        heap = self._heap
        if len(heap) > 2 * self._num_cached + 64:
            current = {id(pair[2]): pair for pair in heap if self._counts(pair[2], pair[0])}
            heap[:] = current.values()
            heapq.heapify(heap)
        heapq.heappush(heap, (entry.rank, self.tick(), entry))


PolicyFactory: TypeAlias = Callable[[Tick, Capacity], Policy]
"""What the manager is given as `policy`: it makes one policy object per priority class."""
