"""When records were used, in counts of uses, and until when they are kept, by the clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class Recency:
    """A counter of uses, which several indexes may share so that their stamps compare."""

    def __init__(self) -> None:
        self.now = 0

    def take(self, count: int) -> int:
        """Take `count` stamps, newer than all before; return the newest."""
        self.now += count
        return self.now

    def falling(self, count: int) -> NDArray[np.int64]:
        """Take `count` stamps for a prompt's records, its head first: the head's is the newest."""
        newest = self.take(count)
        return np.arange(newest, newest - count, -1)


class Leases:
    """Deadlines of slots. A slot without one is not leased."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def extend(self, slots: Iterable[int], until: float) -> None:
        """Lease slots; where a lease lasts longer already, it stays."""
        for slot in slots:
            self._until[slot] = max(until, self._until.get(slot, until))

    def end(self, slots: Iterable[int]) -> None:
        """Forget the leases of slots, if they have any."""
        for slot in slots if self._until else ():
            self._until.pop(slot, None)

    def move(self, slot: int, to: int) -> None:
        """Let another slot have the lease of this one."""
        if slot in self._until:
            self._until[to] = self._until.pop(slot)

    def active(self, now: float) -> Sequence[int]:
        """Return the slots leased beyond `now`, and forget the other leases."""
        self._until = {slot: until for slot, until in self._until.items() if until > now}
        return list(self._until)

    def is_active(self, slot: int, now: float) -> bool:
        """Return whether a slot is leased beyond `now`."""
        return self._until.get(slot, now) > now

    def slots(self) -> NDArray[np.int64]:
        """Return the slots with a lease, over or not: int64."""
        return np.array(list(self._until), np.int64)

    def __len__(self) -> int:
        return len(self._until)


def oldest(stamps: NDArray[np.int64], count: int, before: int) -> NDArray[np.int64]:
    """Return up to `count` slots with the lowest stamps above 0 and below `before`: int64, lowest first.

    Of many slots it may return fewer than are there, but no other would have come before them.
    """
    end = before
    sample = stamps[:: max(1, len(stamps) // _SAMPLE)]
    if len(stamps) > 2 * _SAMPLE and len(sample := sample[sample > 0]) > _SAMPLE // 2:
        # All below a stamp are the oldest; a sample tells which stamp leaves about so many.
        rank = min(len(sample) - 1, count * len(sample) // int(np.count_nonzero(stamps)))
        end = min(before, int(np.partition(sample, rank)[rank]))
    slots = np.flatnonzero((stamps > 0) & (stamps < end))
    if not len(slots) and end < before:
        slots = np.flatnonzero((stamps > 0) & (stamps < before))
    own = stamps[slots]
    if count < len(slots):
        chosen = np.argpartition(own, count)[:count]
        slots, own = slots[chosen], own[chosen]
    return slots[np.argsort(own)]


_SAMPLE = 1 << 15
