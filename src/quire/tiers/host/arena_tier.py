"""Reading from an arena, and wiping: one tenant's records go, and its bytes in unused memory."""

from __future__ import annotations

import threading
from abc import ABC
from collections.abc import Callable

import numpy as np

from quire.tiers.base import Answers, Buffers, Keys, Outcome, Tier
from quire.tiers.deadlines import in_time
from quire.tiers.host.arena import Arena, Shelf
from quire.tiers.purging import Purge, owned
from quire.tiers.threads import BusyKeys, wait_for

WINDOW_BYTES = 16 << 20
"""Free places that are taken at once to be wiped."""


class ArenaTier(Tier, ABC):
    """The part of a tier over an `Arena` that reads from it and purges it.

    To purge, records are forgotten first, and then all that is free is zeroed: places, chunks, and what is left of chunks behind
    their last place. A place that is being filled meanwhile gets a whole record; a lent one that comes back
    without a record is zeroed then.
    """

    _lock: threading.Lock
    _arena: Arena
    _leaving: BusyKeys
    _clock: Callable[[], float]

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self._check_open()
        for index in in_time(len(keys), timeout_s, self._clock):
            outcome, writing = self._read(keys[index], buffers[index])
            answers.settle(index, outcome)
            if answers.claims_drop(index):
                self._drop(keys[index], writing)

    def _read(self, key: bytes, buffer: memoryview) -> tuple[Outcome, int]:
        """Fill a buffer; return what became of it, and which writing of its place was read."""
        while True:
            with self._lock:
                found = self._arena.find(key)
                if found is None:
                    return Outcome.ABSENT, 0
                shelf, place = found
                if shelf.size != len(buffer):
                    return Outcome.FOREIGN, 0
                generation = shelf.index.generation_of(place)
                source = shelf.view(place)
            # Unlike a memoryview, NumPy lets other threads run while it copies.
            np.copyto(np.frombuffer(buffer, np.uint8), source)
            with self._lock:
                same = shelf.index.find(key) == place
                if same and shelf.index.generation_of(place) == generation:
                    return Outcome.HIT, generation

    def _drop(self, key: bytes, writing: int) -> None:
        """Forget a key's record, if it is the one that was read."""
        with self._lock:
            found = self._arena.find(key)
            if found is not None and found[0].index.generation_of(found[1]) == writing:
                self._remove(*found)

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
            told = [self._leaving.ended(key) for key in list(self._leaving) if purge.owns(key)]
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

    def _check_open(self) -> None:
        """Raise `TierError` where it was closed."""
        raise NotImplementedError

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
