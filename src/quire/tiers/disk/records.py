"""Which record lies in which slot of which slab: the indexes and the log, changed together."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from struct import Struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import InvariantError
from quire.tiers.base import Entry
from quire.tiers.disk.lines import FRAME_LINES, LINE, SIZE_UNIT, Line
from quire.tiers.disk.log import DiskLog
from quire.tiers.disk.slab import Slab
from quire.tiers.slots.index import NOWHERE
from quire.tiers.slots.recency import Recency

_AT_ONCE = 1024
"""Records that are retired before others get the lock: about 4 ms."""


_TAG = Struct("<Q")
_TAG_AT = 120

_FEW = 128
"""Keys from which on a look at all of them at once is faster than one by one, after a model has had the caches."""


class Place(msgspec.Struct, frozen=True):
    """Where a record lies, and the tag that it must carry there.

    With a stamp, it is meant only as long as it was not used again.
    """

    slab: Slab
    slot: int
    tag: int
    stamp: int = 0


class Written(msgspec.Struct, frozen=True):
    """A reserved slot that was filled and is not found yet."""

    slab: Slab
    slot: int
    key: bytes
    tag: int
    stamp: int


class DiskRecords:
    """Records by key over slabs of several sizes.

    A key is in at most one slab. Two locks: `_changes` orders what is published and retired,
    so that the log's order is that of the indexes; `lock` guards the indexes and is held for
    microseconds, never while a file is written. Whoever takes both takes `_changes` first.

    A line is written before a record is found and before its slot is free again. So at any
    moment the log names no slot that holds, or may soon hold, another record.
    """

    def __init__(self, slabs: dict[int, Slab], log: DiskLog, recency: Recency) -> None:
        self.slabs = slabs
        self.recency = recency
        self.lock = threading.Lock()
        self.log = log
        self.num_lines = 0
        """Lines since the last whole log."""
        self.num_touches = 0
        """Uses since the last whole log, which no line tells."""
        self.failed_appends = 0
        self._changes = threading.Lock()

    def __len__(self) -> int:
        return sum(len(slab.index) for slab in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots that hold a record."""
        return sum(len(slab.index) * slab.record_bytes for slab in self._all())

    def find(self, key: bytes) -> Place | None:
        """Return where a key's record lies. The caller holds `lock`."""
        return place_in(self.slabs.values(), key)

    def pinned(self, key: bytes) -> Place | None:
        """Return where a key's record lies; its bytes stay until `unpin`."""
        with self.lock:
            place = self.find(key)
            if place is not None:
                place.slab.pin(place.slot)
            return place

    def pins(self, place: Place) -> bool:
        """Return whether the record that was meant still lies there; then its bytes stay until `unpin`."""
        with self.lock:
            if still := is_there(place):
                place.slab.pin(place.slot)
            return still

    def keys_at(self, places: Sequence[Place]) -> list[tuple[Place, bytes]]:
        """Return those places where the record that was meant still lies, and its key."""
        with self.lock:
            return [
                (place, place.slab.index.key_of(place.slot)) for place in places if is_there(place)
            ]

    def unpin(self, place: Place) -> None:
        """Let a slot go that `pinned` returned."""
        with self.lock:
            place.slab.unpin(place.slot)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys have a record."""
        with self.lock:
            return self._are_there(keys)

    def touch(self, keys: Sequence[bytes]) -> tuple[int, list[bool]]:
        """Mark a prompt's records as just used, its head first, as far as they are there.

        Returns the head's stamp, and which are there; the stamps of the others fall by one each,
        there or not.
        """
        with self.lock:
            newest = self.recency.take(len(keys))
            self.num_touches += len(keys)
            if len(keys) >= _FEW:
                there = np.zeros(len(keys), np.bool_)
                stamps = np.arange(newest, newest - len(keys), -1)
                for slab in self._all():
                    slots = slab.index.find_many(keys)
                    found = slots != NOWHERE
                    slab.index.touch(slots[found], stamps[found])
                    there |= found
                return newest, there.tolist()
            known = [False] * len(keys)
            for slab in self._all():
                for at, slot in enumerate(map(slab.index.find, keys)):
                    if slot != NOWHERE:
                        slab.index.restamp(slot, newest - at)
                        known[at] = True
        return newest, known

    def lease(self, keys: Sequence[bytes], until: float) -> None:
        """Keep records from making room until then."""
        with self.lock:
            for place in filter(None, map(self.find, keys)):
                place.slab.index.lease([place.slot], until)

    def end_leases(self, keys: Sequence[bytes]) -> None:
        """Let records make room again."""
        with self.lock:
            for place in filter(None, map(self.find, keys)):
                place.slab.index.end_leases([place.slot])

    def commit(self, batch: Sequence[Written]) -> list[bool]:
        """Let filled slots be found; return for which of them another thread was faster.

        Raises `OSError` where the log cannot be written; then none of them is found.
        """
        with self._changes:
            with self.lock:
                late = self._are_there([each.key for each in batch])
                for each in compress(batch, late):
                    each.slab.index.release(each.slot)
            fresh = [each for each, is_late in zip(batch, late, strict=True) if not is_late]
            try:
                self._append([_line_of(each) for each in fresh])
            except OSError:
                with self.lock:
                    for each in fresh:
                        each.slab.index.release(each.slot)
                raise
            with self.lock:
                for slab in {each.slab.record_bytes: each.slab for each in fresh}.values():
                    own = [each for each in fresh if each.slab is slab]
                    slab.index.publish_all(
                        [each.slot for each in own],
                        [each.key for each in own],
                        [each.tag for each in own],
                        [each.stamp for each in own],
                    )
        return late

    def drop(self, places: Sequence[Place]) -> int:
        """Forget records, as far as they still lie there; return how many did.

        Where the log cannot be written they are forgotten all the same: a record that
        reappears after a restart is either what it says or carries another tag.
        """
        # The lowest slot is given out first again, so that a prompt's records lie in their order.
        places = sorted(places, key=lambda place: (place.slab.record_bytes, -place.slot))
        dropped = 0
        for start in range(0, len(places), _AT_ONCE):
            with self._changes:
                with self.lock:
                    some = [place for place in places[start : start + _AT_ONCE] if is_there(place)]
                try:
                    self._append([Line(each.slab.record_bytes, each.slot) for each in some])
                except OSError:
                    self.failed_appends += 1
                with self.lock:
                    for place in some:
                        place.slab.retire(place.slot)
            dropped += len(some)
        return dropped

    def drop_keys(self, keys: Sequence[bytes]) -> None:
        """Forget the records of keys."""
        with self.lock:
            places = list(filter(None, map(self.find, keys)))
        self.drop(places)

    def move(self, place: Place, to: int) -> bool:
        """Let a copy in a reserved slot of the slab be the record; return whether it still was one.

        The slot that it leaves stays reserved. Raises `OSError` where the log cannot be
        written; then the record stays where it is.
        """
        with self._changes:
            with self.lock:
                if not is_there(place):
                    return False
                index = place.slab.index
                key, stamp = index.key_of(place.slot), index.stamp_of(place.slot)
            # In this order: a crash between the lines leaves the record twice, and the later counts.
            copied = _line_of(Written(place.slab, to, key, place.tag, stamp))
            self._append([copied, Line(place.slab.record_bytes, place.slot)])
            with self.lock:
                index.move(place.slot, to)
        return True

    def write_whole(self) -> None:
        """Write all records as one log and drop the older ones. Raises `OSError`.

        Meanwhile records come and go: a slot's lines in the log that goes on come after what
        the whole one says of it, and the last line counts.
        """
        with self._changes:
            number = self.log.begin_whole()
            before = self.num_lines
            self.num_lines = self.num_touches = 0
        try:
            self.log.write_whole(number, self._chunks())
        except OSError:
            self.num_lines += before
            raise

    def entries(self) -> Iterator[Entry]:
        """List the records there are now; of one that goes meanwhile, too."""
        with self.lock:
            return entries_of(self._all())

    def sync(self) -> None:
        """Return when all records and their lines would survive a loss of power."""
        for slab in self._all():
            slab.sync()
        with self._changes:
            self.log.sync()

    def check(self) -> None:
        """Verify the indexes and that no key is in two; raises `InvariantError`."""
        with self.lock:
            keys: list[bytes] = []
            for slab in self._all():
                slab.check()
                keys += [key.tobytes() for key in _arrays(slab)[0]]
            if len(set(keys)) != len(keys):
                raise InvariantError("a key lies in two slabs")

    def close(self) -> None:
        """Close all files."""
        for slab in self._all():
            slab.close()
        self.log.close()

    def _all(self) -> list[Slab]:
        return list(self.slabs.values())

    def _are_there(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys have a record. The lock is held."""
        there = [False] * len(keys)
        for slab in self._all():
            find = slab.index.find
            there = [was or find(key) != NOWHERE for was, key in zip(there, keys, strict=True)]
        return there

    def _append(self, lines: list[Line]) -> None:
        if lines:
            self.log.append(lines)
            self.num_lines += len(lines)

    def _chunks(self) -> Iterator[NDArray[Any]]:
        for slab in self._all():
            start = 0
            while start < slab.index.num_slots:
                with self.lock:
                    stamps = slab.index.stamps[start : start + FRAME_LINES]
                    slots = start + np.flatnonzero(stamps)
                    lines = np.zeros(len(slots), LINE)
                    lines["stamp"] = slab.index.stamps[slots]
                    lines["tag"] = slab.index.generations_of(slots)
                    lines["key"] = slab.index.keys_of(slots)
                lines["slot"] = slots
                lines["size"] = slab.record_bytes // SIZE_UNIT
                start += FRAME_LINES
                if len(lines):
                    yield lines


def place_in(slabs: Iterable[Slab], key: bytes) -> Place | None:
    """Return where a key's record lies."""
    for slab in slabs:
        slot = slab.index.find(key)
        if slot != NOWHERE:
            return Place(slab, slot, slab.index.generation_of(slot))
    return None


def entries_of(slabs: Sequence[Slab]) -> Iterator[Entry]:
    """List the records of slabs as they are when this is called."""
    held = [(slab.record_bytes, *_arrays(slab)) for slab in slabs]
    stamps = np.sort(np.concatenate([own for _, _, own in held] or [np.zeros(0)]))

    def each() -> Iterator[Entry]:
        for record_bytes, keys, own in held:
            ages = len(stamps) - 1 - np.searchsorted(stamps, own)
            for key, age in zip(keys, ages.tolist(), strict=True):
                yield Entry(key.tobytes(), record_bytes, age)

    return each()


def tag_of(record: memoryview) -> int:
    """Return a record's header checksum: it covers key, generation and payload checksum."""
    return _TAG.unpack_from(record, _TAG_AT)[0]


def _line_of(each: Written) -> Line:
    return Line(each.slab.record_bytes, each.slot, each.stamp, each.tag, each.key)


def is_there(place: Place) -> bool:
    """Return whether the record that was meant still lies there. The caller holds the lock."""
    index, slot = place.slab.index, place.slot
    if slot >= index.num_slots:
        return False
    stamp = index.stamp_of(slot)
    return stamp > 0 and index.generation_of(slot) == place.tag and place.stamp in (0, stamp)


def _arrays(slab: Slab) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return copies of a slab's keys and their stamps."""
    slots = slab.index.published()
    return slab.index.keys_of(slots), slab.index.stamps[slots]
