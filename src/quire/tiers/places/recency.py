"""Stamps of use, by a counter, and who was used longest ago."""

from __future__ import annotations

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
