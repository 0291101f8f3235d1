"""One piece of memory for records of several sizes: chunks that are cut into places of one size each."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.tiers.format import PAGE_BYTES, PRIVATE
from quire.tiers.places.index import NOWHERE, PlaceIndex, Recency
from quire.tiers.threads import Background

CHUNK_BYTES = 64 << 20
"""What chunks are at most, unless one record is larger: what moves between sizes in one go."""

FEWEST_CHUNKS = 16

AHEAD_BYTES = 256 << 20
"""So much is taken ahead of what is used, again when half of it is left."""

STEP_BYTES = 8 << 20

MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: makes pages present as if written to, and leaves what they hold."""


class Shelf:
    """The places of one size: their index, and the chunks that they lie in.

    Place s lies in chunk `chunks[s // per_chunk]`.
    """

    def __init__(self, arena: Arena, size: int) -> None:
        self.size = size
        self.index = PlaceIndex(0, arena.recency)
        self.chunks: list[int] = []
        self.per_chunk = arena.chunk_bytes // size
        self._arena = arena

    def view(self, place: int) -> NDArray[np.uint8]:
        """View the bytes of a place."""
        return self.views((place,))[0]

    def views(self, places: Iterable[int]) -> list[NDArray[np.uint8]]:
        """View the bytes of places."""
        arena, views = self._arena, list[NDArray[np.uint8]]()
        for place in places:
            chunk, inside = divmod(place, self.per_chunk)
            start = self.chunks[chunk] * arena.chunk_bytes + inside * self.size
            views.append(arena.memory[start : start + self.size])
        return views


class Arena:
    """Memory of `capacity` bytes, shared by shelves of one record size each.

        chunks of all shelves + free chunks == all chunks, each once

    It is cut for one record size, which then wastes next to nothing; others waste what is left
    of a chunk behind their last whole place. Not thread-safe: its owner locks.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.recency = Recency()
        # Private: a forked child must not write into it. Huge pages are not asked for: the first
        # write of each was measured at a fifth of the speed of small ones, later writes alike.
        self._map = mmap.mmap(-1, capacity, **PRIVATE)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.pages = PagesAhead(self.memory)
        self.chunk_bytes = 0
        self.shelves: dict[int, Shelf] = {}
        self.free_chunks: list[int] = []
        self.writings = 0

    def cut(self, size: int) -> bool:
        """Cut chunks for a record size; return whether that was possible: no place may be taken."""
        shelves = self.shelves.values()
        if any(shelf.index.num_free != shelf.index.num_places for shelf in shelves):
            return False
        places = self.capacity // size
        fewest = min(places, max(FEWEST_CHUNKS, -(-self.capacity // CHUNK_BYTES)))
        # Among a few numbers of chunks there is one that leaves next to nothing over.
        counts = np.arange(fewest, min(4 * fewest, places) + 1)
        count = int(counts[(places % counts).argmin()])  # the fewest, of several
        self.chunk_bytes = places // count * size
        if self.chunk_bytes >= 1 << 20:
            self.chunk_bytes -= self.chunk_bytes % PAGE_BYTES
        self.shelves = {}
        self.free_chunks = list(range(self.capacity // self.chunk_bytes))[::-1]
        return True

    def publish(
        self, shelf: Shelf, places: Sequence[int], keys: Sequence[bytes], stamps: Sequence[int]
    ) -> None:
        """Let filled places be found, each under a generation that no other writing has."""
        first = self.writings + 1
        self.writings += len(places)
        shelf.index.publish_all(places, keys, range(first, first + len(places)), stamps)

    def find(self, key: bytes) -> tuple[Shelf, int] | None:
        """Return the shelf and place of a key's record."""
        for shelf in self.shelves.values():
            place = shelf.index.find(key)
            if place != NOWHERE:
                return shelf, place
        return None

    def places_of(self, size: int, keys: Sequence[bytes]) -> list[int]:
        """Return the place that each key has on the shelf of a size; `NOWHERE` where it has none."""
        shelf = self.shelves.get(size)
        return shelf.index.find_each(keys) if shelf is not None else [NOWHERE] * len(keys)

    def contains(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Return the keys that have a place: bool [keys]."""
        found = np.zeros(len(keys), np.bool_)
        for shelf in self.shelves.values():
            found |= shelf.index.find_many(keys) != NOWHERE
        return found

    def listed(self) -> list[tuple[int, bytes, int]]:
        """List the stamp, key and size of each record, those used last first."""
        found: list[tuple[int, bytes, int]] = []
        for size, shelf in self.shelves.items():
            places = shelf.index.published()
            keys, stamps = shelf.index.keys_of(places), shelf.index.stamps[places].tolist()
            found += [(stamp, keys[at].tobytes(), size) for at, stamp in enumerate(stamps)]
        return sorted(found, reverse=True)

    def use(self, keys: Sequence[bytes]) -> None:
        """Mark records as just used, the first newest of all."""
        stamps = self.recency.falling(len(keys))
        for shelf in self.shelves.values():
            shelf.index.touch(keys, stamps)

    def shelf(self, size: int) -> Shelf | None:
        """Return the shelf of a size, made if need be; None where a chunk is too small for it."""
        if size > self.chunk_bytes:
            return None
        if size not in self.shelves:
            for empty in [size for size, shelf in self.shelves.items() if not shelf.chunks]:
                del self.shelves[empty]
            self.shelves[size] = Shelf(self, size)
        return self.shelves[size]

    def extend(self, shelf: Shelf) -> bool:
        """Give a free chunk to a shelf; return whether there was one."""
        if not self.free_chunks:
            return False
        chunk = self.free_chunks.pop()
        shelf.chunks.append(chunk)
        shelf.index.grow(len(shelf.chunks) * shelf.per_chunk)
        self.pages.reach((chunk + 1) * self.chunk_bytes)
        return True

    def give_up_chunk(self, shelf: Shelf) -> bool:
        """Move what lies in a shelf's last chunk into its other places and free the chunk.

        Returns whether that was possible: there must be a chunk's worth of free places, and
        none that is being filled there.
        """
        index, end = shelf.index, (len(shelf.chunks) - 1) * shelf.per_chunk
        if end < 0 or index.num_free < shelf.per_chunk or (index.reserved() >= end).any():
            return False
        moving = index.published()
        moving = moving[moving >= end].tolist()
        taken = index.reserve_some(index.num_free)
        below = [place for place in taken if place < end]
        for place, to in zip(moving, below, strict=False):
            shelf.view(to)[:] = shelf.view(place)
            index.move(place, to)
        left = [place for place in taken if place >= end]
        index.release(*below[len(moving) :], *left, *moving)
        index.shrink(end)
        self.free_chunks.append(shelf.chunks.pop())
        return True

    def wipe(self, start: int, stop: int) -> None:
        """Zero bytes that no place has, and give whole pages of them back to the system."""
        first, last = -(-start // mmap.PAGESIZE), stop // mmap.PAGESIZE
        if sys.platform != "linux" or first >= last:
            self.memory[start:stop] = 0
            return
        at, end = first * mmap.PAGESIZE, last * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, at, end - at)  # private: what comes again is zeros
        self.memory[start:at] = 0
        self.memory[end:stop] = 0

    def wipe_rests(self) -> None:
        """Zero what chunks have behind their last place, and the memory behind the last chunk."""
        size = self.chunk_bytes
        for shelf in self.shelves.values():
            for chunk in shelf.chunks:
                self.wipe(chunk * size + shelf.per_chunk * shelf.size, (chunk + 1) * size)
        self.wipe(self.capacity // size * size if size else 0, self.capacity)

    def release(self) -> None:
        """Give the memory back as soon as no thread copies from it."""
        self.shelves, self.free_chunks, self.chunk_bytes = {}, [], 0
        self.memory, self._map = np.zeros(0, np.uint8), mmap.mmap(-1, 1)

    def check(self) -> None:
        """Verify the law of the class and every index; raises `InvariantError`."""
        chunks = [chunk for shelf in self.shelves.values() for chunk in shelf.chunks]
        total = self.capacity // self.chunk_bytes if self.chunk_bytes else 0
        if sorted(chunks + self.free_chunks) != list(range(total)):
            raise InvariantError(f"chunks {chunks} and free {self.free_chunks} of {total}")
        for shelf in self.shelves.values():
            shelf.index.check()
            if shelf.index.num_places != len(shelf.chunks) * shelf.per_chunk:
                raise InvariantError(f"{shelf.index.num_places} places in {shelf.chunks}")


class PagesAhead:
    """Makes memory present ahead of its use, in the background, from its start on, which begins a page.

    The first write to a page costs a few microseconds, many times the copy into it. Where the system
    cannot do this, pages come with the first write. `background` takes them; when it has stopped, the memory may go.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self._taken = 0
        self._wanted = 0
        self._madvise = _madvise()
        self.background = Background(self._take, "quire host pages")
        self.reach(0)

    def reach(self, end: int) -> None:
        """Say that the memory is used as far as `end`, in bytes. Does not wait."""
        if self._madvise is not None and 2 * (self._taken - end) < AHEAD_BYTES:
            steps = -(-(end + AHEAD_BYTES) // STEP_BYTES)
            self._wanted = min(steps * STEP_BYTES, self._memory.size)
            if self._taken < self._wanted:
                self.background.wake()

    def give_up(self) -> None:
        """Take no more than what is being taken."""
        self._wanted = 0

    def _take(self) -> bool:
        size = min(STEP_BYTES, self._wanted - self._taken)
        if self._madvise is None or size <= 0:
            return False
        start = self._memory.ctypes.data + self._taken
        if self._madvise(start, size, MADV_POPULATE_WRITE):
            self._madvise = None  # an older system, or no memory left: the first write will tell
            return False
        self._taken += size
        return True


def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's function; with it, others run meanwhile, unlike with that of `mmap`."""
    if sys.platform != "linux":
        return None
    madvise: Any = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
