"""Room on disk: slabs that grow, records that go, and space that moves between sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Evicting, Outcome, Tier, checked
from quire.tiers.disk.files import AlignedBuffers, is_full, zero
from quire.tiers.disk.records import DiskRecords, Spot, is_there
from quire.tiers.disk.slab import Slab
from quire.tiers.format import new_buffer
from quire.tiers.threads import TimedLock

Clock: TypeAlias = Callable[[], float]

STEP_BYTES = 4 << 20
"""Room that is added, or pre-written, at once."""

EVICTED_SHARE = 20
"""One in so many records is chosen at once to go: choosing takes a look at all stamps."""

AT_ONCE = 1024
AT_ONCE_BYTES = 64 << 20
"""Records, and bytes of records, that make room for one that comes: a few milliseconds."""

IDLE_SHARE = 10
"""One in so many bytes may be free in slabs of other sizes before they are taken from there."""


_CHOSEN = np.dtype([("slab", "i8"), ("place", "i8"), ("tag", "u8"), ("stamp", "i8")])


class DiskRoom:
    """Gives out places. All slabs together never have more bytes than `capacity`.

    `lock` is held while room is made; whoever finds a free place does not need it.
    """

    def __init__(
        self, tier: Tier, records: DiskRecords, capacity: int, ahead: int, clock: Clock
    ) -> None:
        self.capacity = capacity
        self.lock = TimedLock()
        self.wanted: set[int] = set()
        """Record sizes that were written since their slabs were last far enough ahead."""
        self._records = records
        self._ahead = ahead
        self._clock = clock
        self._tier = tier
        self._buffer = AlignedBuffers()
        self._chosen = np.zeros(0, _CHOSEN)
        self._chosen_from: list[Slab] = []

    @property
    def used(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.num_bytes for slab in self._slabs)

    @property
    def _slabs(self) -> list[Slab]:
        return list(self._records.slabs.values())

    def reserve(
        self, record_bytes: int, count: int, before: int, until: float
    ) -> tuple[Slab | None, list[int]]:
        """Take up to `count` places of the slab for records of a size, evicting if none is free.

        Records with stamps from `before` on are not evicted; the list of places is then empty. Raises `OSError`,
        as `TimeoutError` where other threads take longer than `until` to make room.
        """
        if record_bytes > self.capacity:
            return None, []
        slab = self._slab(record_bytes)
        with self._records.lock:
            if places := slab.index.reserve_some(count):
                return slab, places
        left_s = until - self._clock()
        return slab, self.lock.run(partial(self._make, slab, count, before), left_s)

    def _make(self, slab: Slab, count: int, before: int) -> list[int]:
        """Take places, making room until there are some, or none is to be made. The lock is held."""
        has_evicted = has_taken = False
        while True:
            with self._records.lock:
                if places := slab.index.reserve_some(count):
                    return places
            if self._grows(slab):
                continue
            is_disk_full = self.capacity - self.used >= slab.record_bytes
            # Where even room that was given back is gone, the disk is full of other things.
            is_lost = is_disk_full and has_taken
            if not is_lost and self._takes_over(slab, at_once=has_evicted or is_disk_full):
                has_taken = True
            elif self._evicts(before, [slab] if is_lost else self._slabs):
                has_evicted = True
            elif is_lost or not self._takes_over(slab, at_once=True):
                with self._records.lock:
                    return slab.index.reserve_some(count)

    def wait(self, timeout_s: float) -> None:
        """Return when room that is being made is made; waits so long at most."""
        with suppress(TimeoutError):
            self.lock.run(lambda: None, timeout_s)

    def _slab(self, record_bytes: int) -> Slab:
        """Return the slab of a record size, made if need be."""
        slabs = self._records.slabs
        slab = slabs.get(record_bytes)
        return slab if slab is not None else self.lock.run(partial(self._opened, record_bytes))

    def _opened(self, record_bytes: int) -> Slab:
        """Return the slab of a record size, opened if nobody has done it. The lock is held."""
        slabs = self._records.slabs
        slab = slabs.get(record_bytes)
        if slab is None:
            slab = slabs.open(record_bytes)
            slab.cut()  # its index may be left of one that somebody removed
            with self._records.lock:
                slabs[record_bytes] = slab
        return slab

    def wants(self, sizes: Iterable[int]) -> bool:
        """Note which slabs of these sizes have less than half of `ahead`; return whether any is noted."""
        for slab in filter(None, map(self._records.slabs.get, sizes)):
            if 2 * slab.free_bytes < self._ahead and self.capacity - self.used >= slab.record_bytes:
                self.wanted.add(slab.record_bytes)
        return bool(self.wanted)

    def prewrite(self) -> bool:
        """Write some of a slab ahead; return whether there may be more to do."""
        for size in sorted(self.wanted):
            self.wanted.discard(size)  # before the look: it may be wanted again right behind that
            slab = self._records.slabs.get(size)
            if slab is None:
                continue
            with suppress(OSError):  # a put that needs room finds out why there is none
                if self.lock.run(partial(self._prewrites, slab)):
                    self.wanted.add(size)
                    return True
        return False

    def _prewrites(self, slab: Slab) -> bool:
        """Write some of a slab ahead, if it is short; return whether it was. The lock is held."""
        return slab.free_bytes < self._ahead and self._adds(slab, slab.prewrite)

    def forget(self, slabs: Sequence[Slab]) -> None:
        """Give out nothing more of slabs, whose records are forgotten. The lock is held."""
        self._chosen, self._chosen_from = np.zeros(0, _CHOSEN), []
        self._records.forget(slabs)

    def fit(self) -> None:
        """Make slabs that were made for a larger capacity fit this one."""
        while (over := self.used - self.capacity) > 0:
            slabs = sorted(self._slabs, key=lambda each: -each.free_bytes)
            if any(self._shrinks(slab, -(-over // slab.record_bytes)) for slab in slabs):
                continue
            if not self._evicts(self._records.recency.now + 1, self._slabs):
                break

    def _grows(self, slab: Slab) -> bool:
        """Add places to a slab, as far as the capacity and the disk let it."""
        try:
            return self._adds(slab, slab.allocate)
        except OSError as error:
            if is_full(error):
                return False
            raise

    def _adds(self, slab: Slab, prepare: Callable[[int], None]) -> bool:
        most = (self.capacity - self.used) // slab.record_bytes
        count = min(most, max(1, STEP_BYTES // slab.record_bytes))
        if count < 1:
            return False
        try:
            prepare(count)
        except OSError:
            with suppress(OSError):  # what there was of it is others'
                slab.cut()
            raise
        with self._records.lock:
            slab.index.grow(slab.index.num_places + count)
        return True

    def _takes_over(self, slab: Slab, *, at_once: bool) -> bool:
        """Shrink a slab of another size, where enough is free; or `at_once`, where anything is."""
        others = [each for each in self._slabs if each is not slab]
        free = sum(each.free_bytes for each in others)
        missing = slab.record_bytes - (self.capacity - self.used)
        if free < missing or not (at_once or free * IDLE_SHARE >= self.capacity):
            return False
        others.sort(key=lambda each: -each.free_bytes)
        # Half of what is free moves at once; with one record's room in pieces, several slabs give.
        return any(
            self._shrinks(each, max(-(-missing // each.record_bytes), each.index.num_free // 2))
            for each in others
        )

    def _evicts(self, before: int, slabs: list[Slab]) -> bool:
        """Let records of slabs go that were used longest ago; return whether any did.

        A share of all is chosen at once, and goes in pieces, as room is needed.
        """
        spots = self._next_victims(before, slabs)
        if not spots:
            self._chosen, self._chosen_from = self._oldest(before, slabs), slabs
            spots = self._next_victims(before, slabs)
        if self._tier.evicting is not None:
            self._tell(spots, self._tier.evicting)
        self._records.drop(spots)
        return bool(spots)

    def _next_victims(self, before: int, slabs: list[Slab]) -> list[Spot]:
        """Take the next piece of those that were chosen, as far as they still may go."""
        spots: list[Spot] = []
        num_bytes = 0
        while len(self._chosen) and not spots:
            piece = self._chosen[:AT_ONCE].tolist()
            taken = 0
            with self._records.lock:
                for number, place, tag, stamp in piece:
                    if num_bytes >= AT_ONCE_BYTES:
                        break
                    taken += 1
                    spot = Spot(self._chosen_from[int(number)], place, tag, stamp)
                    if stamp < before and spot.slab in slabs and is_there(spot):
                        spots.append(spot)
                        num_bytes += spot.slab.record_bytes
            self._chosen = self._chosen[taken:]
        return spots

    def _oldest(self, before: int, slabs: list[Slab]) -> NDArray[Any]:
        """Return a share of the records of slabs, an array of `_CHOSEN`, used longest ago first."""
        with self._records.lock:
            count = max(1, sum(len(slab.index) for slab in slabs) // EVICTED_SHARE)
            found = [slab.index.victims(count, before=before) for slab in slabs]
            chosen = np.zeros(sum(map(len, found)), _CHOSEN)
            at = 0
            for number, (slab, places) in enumerate(zip(slabs, found, strict=True)):
                own = chosen[at : at + len(places)]
                own["slab"], own["place"] = number, places
                own["stamp"] = slab.index.stamps[places]
                own["tag"] = slab.index.generations_of(places)
                at += len(places)
        return chosen[np.argsort(chosen["stamp"])[:count]]

    def _tell(self, spots: list[Spot], evicting: Evicting) -> None:
        """Read records that are about to go, as far as that is worth it, and hand them over."""
        keys: list[bytes] = []
        told: list[memoryview] = []
        known = self._records.keys_at(spots)
        for at in self._tier.worth_telling([key for _, key in known]):
            spot, key = known[at]
            if not self._records.pins(spot):
                continue
            buffer = new_buffer(spot.slab.record_bytes)
            try:
                is_whole = spot.slab.read(spot.place, buffer)
            except OSError:
                continue
            finally:
                self._records.unpin([spot])
            if is_whole and checked(key, buffer) is Outcome.HIT:
                keys.append(key)
                told.append(buffer)
        if keys:
            evicting(keys, told)

    def _shrinks(self, slab: Slab, count: int) -> bool:
        """Give back up to `count` places of a slab, moving what lies at its end; return if any.

        Places at the end that are being filled or read stay, and all before them.
        """
        index = slab.index
        with self._records.lock:
            first = max(index.num_places - min(count, index.num_free), _end(index.reserved()))
            held = index.reserve_within(first, index.num_places, index.num_places).tolist()
            moving = index.published()
            moving = moving[moving >= first]
            spare = index.reserve_within(0, first, len(moving)).tolist()
            spots = [
                Spot(slab, place, index.generation_of(place)) for place in moving[::-1].tolist()
            ]
        moved: list[tuple[Spot, int]] = []
        try:
            copied = [pair for pair in zip(spots, spare, strict=False) if self._copies(*pair)]
            if copied:
                slab.sync()  # what a `flush` has promised may soon lie in its new place only
                moved = self._records.move(slab, copied)
        finally:
            with self._records.lock:
                taken = {to for _, to in moved}
                free = [*held, *(spot.place for spot, _ in moved)]
                for place in (*free, *(place for place in spare if place not in taken)):
                    slab.release(place)
                in_use = np.concatenate([index.reserved(), index.published(), list(slab.pins)])
                left = max(first, _end(in_use))
                has_shrunk = left < index.num_places
                index.shrink(left)
        if has_shrunk:
            slab.cut()
        return has_shrunk

    def _copies(self, spot: Spot, to: int) -> bool:
        """Copy a record into a reserved place of its slab; return whether there was one."""
        buffer = self._buffer.take(spot.slab.record_bytes)
        try:
            if not spot.slab.read(spot.place, buffer):
                return False
            spot.slab.write(to, buffer)
        finally:
            zero(buffer)
        return True


def _end(places: Any) -> int:
    """Return the index behind the highest place."""
    return int(np.max(places, initial=-1)) + 1
