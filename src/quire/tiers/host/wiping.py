"""Wiping of an arena: deletes one tenant's records and overwrites its bytes in unused memory."""

from __future__ import annotations

import threading
from abc import ABC

import numpy as np

from quire.tiers.base import Tier
from quire.tiers.host.arena import Arena, Shelf
from quire.tiers.host.busy import BusyKeys, wait_for
from quire.tiers.purging import Purge, owned

WINDOW_BYTES = 16 << 20
"""Free places that are taken at once to be wiped."""


class ArenaTier(Tier, ABC):
    """The part of a tier over an `Arena` that purges it.

    Records are forgotten first, and then all that is free is zeroed: places, chunks, and what is left of chunks behind
    their last place. A place that is being filled meanwhile gets a whole record; a lent one that comes back
    without a record is zeroed then.
    """

    _lock: threading.Lock
    _arena: Arena
    _leaving: BusyKeys

    def _purge(self, purge: Purge) -> None:
        with self._lock:
            arena = self._arena
            for shelf in arena.shelves.values():
                places = shelf.index.published()
                own = places[owned(shelf.index.keys_of(places), purge.tag)]
                for place in own.tolist():
                    self._remove(shelf, place)
                purge.count += len(own)
                purge.num_bytes += len(own) * shelf.size
            told = [self._leaving.ended(key) for key in self._leaving if purge.owns(key)]
        wait_for(
            told, purge.left_s
        )  # who is told of a record that makes room reads it where it lies
        with self._lock:
            for chunk in arena.free_chunks:
                arena.wipe(chunk * arena.chunk_bytes, (chunk + 1) * arena.chunk_bytes)
            arena.wipe_rests()
            shelves = list(arena.shelves.values())
        for shelf in shelves:
            step = max(1, WINDOW_BYTES // shelf.size)
            first = 0
            while first < shelf.index.num_places:
                self._wipe_places(shelf, first, first + step)
                first += step
                assert purge.left_s

    def _remove(self, shelf: Shelf, place: int) -> None:
        """Forget what a place holds. The lock is held."""
        raise NotImplementedError

    def _wipe_places(self, shelf: Shelf, first: int, stop: int) -> None:
        """Zero the free places among those from `first` on and before `stop`."""
        index = shelf.index
        with self._lock:
            places = index.reserve_within(first, stop, stop - first).tolist()
        try:
            for place in places:
                shelf.view(place)[:] = 0
        finally:
            with self._lock:
                index.wipe(np.array(places, np.int64))
                index.release(*places[::-1])
