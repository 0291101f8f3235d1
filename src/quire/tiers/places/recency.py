"""Stamps of use, by a counter, and leases, by the clock."""

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
    """Deadlines of places. A place without one is not leased."""

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def extend(self, places: Iterable[int], until: float) -> None:
        """Lease places; where a lease lasts longer already, it stays."""
        for place in places:
            self._until[place] = max(until, self._until.get(place, until))

    def end(self, places: Iterable[int]) -> None:
        """Forget the leases of places, if they have any."""
        for place in places if self._until else ():
            self._until.pop(place, None)

    def move(self, place: int, to: int) -> None:
        """Let another place have the lease of this one."""
        if place in self._until:
            self._until[to] = self._until.pop(place)

    def active(self, now: float) -> Sequence[int]:
        """Return the places leased beyond `now`, and forget the other leases."""
        self._until = {place: until for place, until in self._until.items() if until > now}
        return list(self._until)

    def is_active(self, place: int, now: float) -> bool:
        """Return whether a place is leased beyond `now`."""
        return self._until.get(place, now) > now

    def places(self) -> NDArray[np.int64]:
        """Return the places with a lease, over or not: int64."""
        return np.array(list(self._until), np.int64)

    def __len__(self) -> int:
        return len(self._until)


def oldest(stamps: NDArray[np.int64], count: int, before: int) -> NDArray[np.int64]:
    """Return up to `count` places with the lowest stamps above 0 and below `before`: int64, lowest first.

    Of many places it may return fewer than are there, but no other would have come before them.
    """
    end = before
    sample = stamps[:: max(1, len(stamps) // _SAMPLE)]
    if len(stamps) > 2 * _SAMPLE and len(sample := sample[sample > 0]) > _SAMPLE // 2:
        # All below a stamp are the oldest; a sample tells which stamp leaves about so many.
        rank = min(len(sample) - 1, count * len(sample) // int(np.count_nonzero(stamps)))
        end = min(before, int(np.partition(sample, rank)[rank]))
    places = np.flatnonzero((stamps > 0) & (stamps < end))
    if not len(places) and end < before:
        places = np.flatnonzero((stamps > 0) & (stamps < before))
    own = stamps[places]
    if count < len(places):
        chosen = np.argpartition(own, count)[:count]
        places, own = places[chosen], own[chosen]
    return places[np.argsort(own)]


_SAMPLE = 1 << 15
