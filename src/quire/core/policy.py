"""The interface between the cache and a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

Tick: TypeAlias = Callable[[], int]
"""The logical counter: each call gives the next integer. Time, for a policy, is this alone."""

Capacity: TypeAlias = Callable[[], int]
"""Blocks of the pool as it is now; of several pools, of the smallest one."""

Clock: TypeAlias = Callable[[], float]
"""Seconds, rising."""

ENDLESS = 1 << 31
"""More blocks than there are: all of them."""


class Entry(msgspec.Struct, gc=False, eq=False):
    """A run of cached blocks, as a policy sees it.

    `end` counts the blocks from the root to its end. The other fields belong to the policy, and are
    copied when an entry is cut in two. A victim loses blocks from its tail, as many as are needed, and stays
    an entry while any are left.
    """

    end: int = 0
    older: Any = None
    newer: Any = None
    uses: int = 0
    note: Any = None

    @property
    def evictable(self) -> bool:
        """Whether this may be a victim: it has no reference and no child."""
        raise NotImplementedError  # the tree's node says

    @property
    def num_blocks(self) -> int:
        """Length of the run in blocks."""
        raise NotImplementedError


class Policy(ABC):
    """Decides which entry is evicted next. Sees events and entries, never tokens or the tree.

    Entries form chains: one is evictable only when nothing hangs below it. A use is reported
    from the deepest entry upwards, so a parent's last tick is never before its child's. Where a request goes on
    from the end of an entry, what it stores joins that entry; where a branch that divided two entries is gone, the lower one
    takes over the upper one's run.
    """

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        self.tick = tick
        self.capacity = capacity

    def touched(self, entry: Entry) -> None:  # noqa: B027 - LRU and FIFO need not look
        """A request found this entry. It is referenced now, so it is no candidate."""

    @abstractmethod
    def released(self, entry: Entry) -> None:
        """The last reference to this entry went away: it is cached now, and may have grown."""

    @abstractmethod
    def returned(self, entry: Entry) -> None:
        """A cached entry comes from another class; its last use there still counts."""

    def referenced(self, entry: Entry) -> None:  # noqa: B027 - a heap need not look
        """The cached entry is no candidate any more: it got its first reference, or leaves the tree."""

    def exposed(self, entry: Entry) -> None:  # noqa: B027 - LRU need not look
        """The last entry below this cached one went away: it may be a victim now."""

    def split(self, upper: Entry, lower: Entry) -> None:  # noqa: B027 - a heap need not look
        """A new cached entry took over the head of `lower`, with its uses and note."""

    @abstractmethod
    def victim(self) -> tuple[Entry, int] | None:
        """Return the evictable entry to evict next and how many of its last blocks may go, or None.

        Asked when blocks have to go now. Asked again, with nothing else in between, the answer is the same.
        """

    @abstractmethod
    def order(self) -> Iterator[Entry]:
        """Iterate over the cached entries that this policy holds, coldest first; one comes behind all that continue it.

        For people and checks: `quire.ops.check` asks for it.
        """


PolicyFactory: TypeAlias = Callable[[Tick, Capacity], Policy]
"""What the manager is given as `policy`: it makes one policy object per priority class."""
