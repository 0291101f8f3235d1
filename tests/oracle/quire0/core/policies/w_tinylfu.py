"""W-TinyLFU."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np

from quire0.core.policies.base import Capacity, Entry, Tick
from quire0.core.policies.queues import QueuedPolicy, leaf

Names: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint32]]
Places: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.uint64]]

WINDOW, PROBATION, PROTECTED = range(3)

WINDOW_SHARE = 0.01
PROTECTED_SHARE = 0.8  # of the rest

MAX_COUNT = 15
SAMPLE = 10
"""All counts are halved after so many uses for each block of the capacity."""


class WTinyLfu(QueuedPolicy):
    """Admits to the main cache only what is asked for more often than what would have to go.

    New entries stand in a window of 1 % of the capacity; what is pushed out of it enters
    the main cache, unless it was asked for no more often than the main cache's victim: then it goes itself. The main cache is segmented: what is used there becomes
    protected, up to 80 %, and falls back on probation, from where victims come. All queues
    are least recently used first; how often a block is asked for, a sketch counts and halves.
    Source: Einziger, Friedman, Manes, TinyLFU: a highly efficient cache admission policy, ACM
    Transactions on Storage 13(4), 2017, doi:10.1145/3149371.
    A block that others continue, in its run or below, is admitted as it is: turning it down would
    turn down those. So only leaves of one block are ever compared.
    Left out: the doorkeeper (a byte for each counter instead), the adaptive window.
    Memory: four bytes for each block of the capacity, rounded up to a power of two.
    """

    interior = (WINDOW,)
    num_queues = 3

    def __init__(self, tick: Tick, capacity: Capacity) -> None:
        super().__init__(tick, capacity)
        self._sketch = Sketch(capacity())

    def added(self, entry: Entry) -> None:
        entry.queue = WINDOW
        self._sketch.add(entry.names())

    def touched(self, entry: Entry) -> None:
        if entry.queue == PROBATION:
            entry.queue = PROTECTED
        self._sketch.add(entry.names())

    def joinable(self, upper: Entry, lower: Entry) -> bool:
        return upper.queue == lower.queue  # its place is that of its release, which is the same

    def released(self, entry: Entry) -> None:
        entry.rank = (self.tick(),)
        super().released(entry)

    def victim(self) -> Entry | None:
        window = WINDOW_SHARE * self.capacity()
        unfilled = sum(self.sizes[PROBATION:]) < self.sizes[WINDOW]
        self._demote()
        while self.sizes[WINDOW] > window:
            candidate, victim = self.first(WINDOW), self._main_victim()
            if candidate is None:
                break
            if (
                victim is not None
                and not unfilled
                and candidate.evictable
                and candidate.num_blocks == 1
                and self._asked(candidate) <= self._asked(victim)
            ):
                return candidate
            self.move(candidate, PROBATION)
        victim, newest = self._main_victim(), self.first(WINDOW)
        return leaf(newest) if victim is None and newest is not None else victim

    def _main_victim(self) -> Entry | None:
        return self.first(PROBATION) or self.first(PROTECTED)

    def _demote(self) -> None:
        while self.sizes[PROTECTED] > PROTECTED_SHARE * (1 - WINDOW_SHARE) * self.capacity():
            oldest = self.first(PROTECTED)
            if oldest is None:
                return
            self.move(oldest, PROBATION)

    def _asked(self, entry: Entry) -> int:
        return self._sketch.count(entry.names()[-1])


class Sketch:
    """Counts of names, never too low but for ageing: a count-min sketch of four rows."""

    def __init__(self, capacity: int) -> None:
        bits = max(capacity - 1, 255).bit_length()
        self._shift = np.uint64(64 - bits)
        self._row_starts = np.arange(4, dtype=np.uint64)[:, None] << np.uint64(bits)
        self._counts = np.zeros(4 << bits, np.uint8)
        self._sample = SAMPLE * max(capacity, 1)
        self._added = 0

    def add(self, names: array[int]) -> None:
        """Count each of these names once more, up to 15."""
        counts = self._counts
        places = self._places(np.frombuffer(names, np.uint32))
        counts[places] = np.minimum(counts[places] + 1, MAX_COUNT)
        self._added += len(names)
        if self._added >= self._sample:
            counts >>= 1
            self._added //= 2

    def count(self, name: int) -> int:
        """Return about how often a name was counted."""
        return int(self._counts[self._places(np.array([name], np.uint32))].min())

    def _places(self, names: Names) -> Places:
        return (names.astype(np.uint64) * FACTORS >> self._shift) + self._row_starts


FACTORS = np.array(
    [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F], [0x165667B19E3779F9], [0xD6E8FEB86659FD93]],
    np.uint64,
)
"""Odd numbers with mixed bits: multiplicative hashing, one row each."""
