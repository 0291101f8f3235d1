"""A tier in the memory of this process: copies at the speed of memory, gone with the process."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config import parse_bytes
from quire.errors import TierError
from quire.interrupts import mutating
from quire.tiers.base import Buffers, Keys, ListedRecord, Outcome
from quire.tiers.host.arena import Arena, Shelf
from quire.tiers.host.arena_tier import ArenaTier
from quire.tiers.host.lending import Lending
from quire.tiers.places.index import NOWHERE
from quire.tiers.threads import BusyKeys, wait_for

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOCK_S = 1.0
"""The longest that the lock is waited for after an interrupt; else it is held for microseconds."""

BATCH_BYTES = 16 << 20
"""Records are found after so many bytes of a call were copied, or at its end."""

WATERMARK = 20
"""One part in so many of a size's places makes room in one go."""


class Host(ArenaTier):
    """Records in one piece of memory, taken once and cut into places of exactly their sizes.

    Where all is taken, the records go that were used longest ago, 5 % of their size's in one go, and
    `evicting` sees them first. A size that finds its own records younger than those of another size takes
    room from that one, a chunk at a time (a 16th of the capacity, at most 64 MiB).

    A record larger than any before may need larger chunks: then everything goes once.

    The lock is held to find and to publish, not to copy: a reader looks again afterwards whether
    its record was still there. Around 70 bytes a place for the index are not part of `capacity`.

    A call that is cut off half-way, by Ctrl-C for instance, leaves the tier empty.

    `capacity`  "8GiB" or a number of bytes. It is taken from the system in the background, 256 MiB ahead
    `clock`     seconds, for leases and timeouts
    """

    in_memory = True

    def __init__(
        self,
        capacity: str | int,
        *,
        clock: Callable[[], float] = time.monotonic,
        name: str = "host",
    ) -> None:
        super().__init__()
        self.name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._begin(parse_bytes(capacity))

    def _begin(self, capacity: int) -> None:
        """Hold nothing, in new memory. Raises `TierError` where there is none."""
        try:
            self._arena = Arena(capacity)
        except (OSError, OverflowError, ValueError) as error:
            raise TierError(
                f"no {capacity} bytes of memory for the host tier: {error}; give it less"
            ) from error
        self._filling, self._leaving = BusyKeys(), BusyKeys()
        self._calls: list[frozenset[bytes]] = []
        self._lending = Lending(capacity // 2)

    def _mend(self, why: str) -> None:
        """Start anew: any place may be half taken.

        Calls of other threads go on with the memory that they know, which nobody finds any more.
        """
        if self._closed:
            return
        _log.warning("%s: %s; it is empty now", self.name, why)
        if not self._lock.acquire(timeout=_LOCK_S):
            self._lock = threading.Lock()  # who had it is gone
            self._lock.acquire()
        try:
            self._arena.pages.give_up()
            self._filling.end_all()
            self._leaving.end_all()
            self._begin(self._arena.capacity)
        finally:
            self._lock.release()

    @mutating
    def touch(self, keys: Keys) -> None:
        with self._lock:
            self._arena.use(keys)

    @mutating
    def lease(self, keys: Keys, seconds: float) -> None:
        until = self._clock() + seconds
        with self._lock:
            for found in map(self._arena.find, keys):
                if found is not None:
                    found[0].index.lease([found[1]], until)
                    self._lending.lease(*found, until)

    @mutating
    def lend(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return places as `Tier.lend` says: of one size, at most half of the capacity at a time."""
        lent: list[memoryview] = []
        with self._lock:
            for size, run in groupby(sizes):
                wanted = len(lent) + len(list(run))
                while len(lent) < wanted and (shelf := self._lending_shelf(size)):
                    count = min(wanted - len(lent), self._lending.room(size))
                    lent += self._lending.lend(shelf, shelf.index.reserve_some(count))
                if len(lent) < wanted:
                    break
        return lent

    def _lending_shelf(self, size: int) -> Shelf | None:
        """Return the shelf of a size, with a free place; None where none is to be lent. The lock is held."""
        shelf = None if self._closed else self._arena.shelves.get(size)
        if shelf is None or len(self._arena.shelves) > 1 or not self._lending.room(size):
            return None
        if not (shelf.index.num_free or self._arena.extend(shelf)):
            self._evict(shelf, max(1, shelf.index.num_places // WATERMARK))
            # Others had the lock meanwhile.
            if self._arena.shelves.get(size) is not shelf or not shelf.index.num_free:
                return None
        return shelf

    def take_back(self, records: Sequence[memoryview]) -> None:
        if self._lending.num_bytes:
            self._take_back(records)

    @mutating
    def _take_back(self, records: Sequence[memoryview]) -> None:
        with self._lock:
            self._lending.take_back(records)

    def scan(self) -> Iterator[ListedRecord]:
        """List the records as they are now, those used last first."""
        with self._lock:
            listed = self._arena.listed()
        for age, (_, key, size) in enumerate(listed):
            yield ListedRecord(key, size, age)

    def check(self) -> None:
        with self._lock:
            self._arena.check()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._arena.pages.background.stop()
        with self._lock:
            self._arena.release()

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        deadline = self._clock() + timeout_s
        keys = list(map(bytes, keys))
        spared = frozenset(keys)  # a prompt's head stays for its tail
        with self._lock:
            self._check_open()
            self._cut_for(set(map(len, records)))
            left = self._publish_lent(keys, records, done)
            if not left:
                return
            self._calls.append(spared)
        try:
            left = self._fill(keys, records, left, deadline, done)
            while left:
                if self._clock() > deadline:
                    raise TimeoutError
                left = self._fill(keys, records, left, deadline, done)
        finally:
            with self._lock:
                self._arena.use(keys)
                with contextlib.suppress(ValueError):  # the tier has started anew
                    self._calls.remove(spared)

    def _publish_lent(self, keys: Keys, records: Buffers, done: list[Outcome]) -> list[int]:
        """Let new records in lent places be found, and return which are none. The lock is held."""
        if not self._lending.num_bytes:
            return list(range(len(keys)))
        is_there = self._arena.contains(keys).tolist()
        lent: list[int] = []
        others: list[int] = []
        for index, (key, record) in enumerate(zip(keys, records, strict=True)):
            is_new = not is_there[index] and key not in self._filling
            (lent if is_new and self._lending.is_free(record) else others).append(index)
        newest = self._arena.recency.take(len(keys))
        own = [records[index] for index in lent]
        stamps = [newest - index for index in lent]
        self._lending.publish(own, [keys[index] for index in lent], self._arena, stamps)
        for index in lent:
            done[index] = Outcome.STORED
        return others

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        with self._lock:
            self._check_open()
            return self._arena.contains(keys).tolist()

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        with self._lock:
            for found in map(self._arena.find, keys):
                if found is not None:
                    self._remove(*found)
            told = [self._leaving.ended(key) for key in keys if key in self._leaving]
        wait_for(told, timeout_s)  # nobody is told later than that of a key that is deleted

    def _size(self) -> tuple[int, int, int]:
        with self._lock:
            held = [(len(shelf.index), size) for size, shelf in self._arena.shelves.items()]
        capacity = self._arena.capacity
        return sum(count for count, _ in held), sum(c * size for c, size in held), capacity

    def _check_open(self) -> None:
        if self._closed:
            raise TierError("the host tier is closed")

    def _fill(
        self, keys: Keys, records: Buffers, left: list[int], deadline: float, done: list[Outcome]
    ) -> list[int]:
        """Settle some of the records that are left, all of one size, and return the others.

        Raises `TimeoutError`, but not before one is kept.
        """
        size, there, new = len(records[left[0]]), list[int](), list[int]()
        some = [at for at in left if len(records[at]) == size][: max(1, BATCH_BYTES // size)]
        with self._lock:
            self._check_open()
            filling = self._filling
            found = self._arena.places_of(size, [keys[at] for at in some])
            for at, place in zip(some, found, strict=True):
                if place != NOWHERE:
                    there.append(at)
                elif keys[at] not in filling:
                    new.append(at)
            ended = None if there or new else filling.ended(keys[some[0]])
            names = [keys[at] for at in new]
            shelf = self._shelf_to_fill(names, size, deadline) if new else None
            places = shelf.index.reserve_some(len(new)) if shelf is not None else []
            filling.end(names[len(places) :])
        if ended is not None and not ended.wait(max(0.0, deadline - self._clock())):
            raise TimeoutError
        for at in there:
            done[at] = Outcome.PRESENT
        for at in new if shelf is None else ():
            done[at] = Outcome.FULL
        if shelf is not None:
            new = new[: len(places)]
            copied = self._copy([records[at] for at in new], shelf.views(places), deadline)
            with self._lock:
                filling.end(names[: len(places)])
                for found in map(self._arena.find, names[:copied]):
                    if found is not None:  # of another size
                        self._remove(*found)
                newest = self._arena.recency.take(copied)
                stamps = range(newest, newest - copied, -1)
                self._arena.publish(shelf, places[:copied], names[:copied], stamps)
                shelf.index.release(*places[copied:])
            for at in new[:copied]:
                done[at] = Outcome.STORED
            if copied < len(new):
                raise TimeoutError
        settled = {*there, *new}
        return [at for at in left if at not in settled]

    def _copy(self, records: Buffers, views: Sequence[NDArray[np.uint8]], deadline: float) -> int:
        """Copy records until the deadline, but at least the first; return how many."""
        copied = 0
        for record, view in zip(records, views, strict=True):
            if copied and self._clock() > deadline:
                break
            np.copyto(view, np.frombuffer(record, np.uint8))
            copied += 1
        return copied

    def _shelf_to_fill(self, keys: list[bytes], size: int, deadline: float) -> Shelf | None:
        """Return a shelf with a free place for keys, which are being filled from now on; None where there is no room."""
        shelf = None
        self._filling.begin(keys)
        try:
            shelf = self._make_room(size, deadline)
        finally:
            if shelf is None:
                self._filling.end(keys)
        return shelf

    def _remove(self, shelf: Shelf, place: int) -> None:
        if not self._lending.withdraw(shelf, place):
            shelf.index.remove(place)

    # making room; the lock is held, and given up while `evicting` is told

    def _make_room(self, size: int, deadline: float) -> Shelf | None:
        """Return the shelf of a size, with a free place; None where there is no room."""
        while True:
            self._check_open()
            shelf = self._arena.shelf(size)
            if shelf is None:
                return None
            if shelf.index.num_free or self._arena.extend(shelf):
                return shelf
            others = self._others(shelf)
            if any(self._arena.give_up_chunk(each) for each in others):
                continue
            if not self._evict_for(shelf):
                return None
            if not shelf.index.num_free and self._clock() > deadline:
                raise TimeoutError

    def _others(self, shelf: Shelf) -> list[Shelf]:
        """Return the shelves that a shelf may take chunks from: none while places are lent, which stay."""
        if self._lending.num_bytes:
            return []
        return [each for each in self._arena.shelves.values() if each is not shelf]

    def _evict_for(self, shelf: Shelf) -> bool:
        """Evict from the shelf whose oldest record is the oldest of all; return whether any went."""
        aged: list[tuple[int, int]] = []
        # Another one with a free chunk's worth of places could not give it up: it is being filled.
        others = [each for each in self._others(shelf) if each.index.num_free < each.per_chunk]
        for each in (shelf, *others):
            aged += [(int(each.index.stamps[place]), each.size) for place in self._victims(each, 1)]
        if not aged:
            return False
        donor = self._arena.shelves[min(aged)[1]]
        fewest = 1 if donor is shelf else donor.per_chunk - donor.index.num_free
        return self._evict(donor, max(fewest, donor.index.num_places // WATERMARK)) > 0

    def _victims(self, shelf: Shelf, count: int) -> list[int]:
        """Return up to `count` places, used longest ago first, without what calls in progress store."""
        spared = sum(map(len, self._calls))
        places = shelf.index.victims(count + spared, self._clock()).tolist()
        keys = map(shelf.index.key_of, places)
        pairs = zip(places, keys, strict=True)
        free = (place for place, key in pairs if not any(key in call for call in self._calls))
        return list(islice(free, count))

    def _evict(self, shelf: Shelf, count: int) -> int:
        """Let the oldest records of a shelf go; return how many went."""
        index = shelf.index
        places = self._victims(shelf, count)
        if self.evicting is None:
            index.remove(*places)
            return len(places)
        keys = [key.tobytes() for key in index.keys_of(np.array(places, np.int64))]
        index.unpublish(*places)
        self._leaving.begin(keys)
        try:
            told, evicting = self._unlocked(lambda: self.worth_telling(keys)), self.evicting
            if told and evicting is not None and not self._closed:
                records = [shelf.view(places[at]).data.toreadonly() for at in told]
                self._unlocked(lambda: evicting([keys[at] for at in told], records))
        finally:
            self._leaving.end(keys)
            index.release(*places)
        return len(places)

    def _unlocked(self, call: Callable[[], Result]) -> Result:
        """Make a call while others may have the lock, which is held before and after."""
        lock = self._lock
        try:
            lock.release()
            return call()
        finally:
            lock.acquire()

    def _cut_for(self, sizes: Collection[int]) -> None:
        """See that chunks are large enough for records, by letting everything go if they are not."""
        arena = self._arena
        size = max((each for each in sizes if each <= arena.capacity), default=0)
        if size <= arena.chunk_bytes:
            return
        shelves = list(arena.shelves.values())
        if all(len(self._victims(each, len(each.index))) == len(each.index) for each in shelves):
            for each in shelves:
                self._evict(each, len(each.index))
            # Where another call still fills a place, this record finds no room and the next may.
            if size > arena.chunk_bytes:
                arena.cut(size)
