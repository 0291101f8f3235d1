"""Records by key over slabs: the indexes in memory and in files, changed together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import compress, pairwise

import msgspec
import numpy as np

from quire.errors import InvariantError
from quire.tiers.base import ListedRecord
from quire.tiers.disk.slab import Slab, Slabs
from quire.tiers.format import TAG_AT
from quire.tiers.places.columns import as_words, later_duplicates
from quire.tiers.places.index import NOWHERE

_AT_ONCE = 1024
"""Records that are retired before others get the lock: about 4 ms."""

RUN_BYTES = 1 << 20
"""Neighbouring places are written, and read, by one call of the system, about so many bytes at once."""

_LOOKED_FOR_BYTES = 16 << 20
"""The same for asking what the page cache has: the system takes 20 us to say it."""

_RUN_RECORDS = 256

HEADER_CHECKSUM = slice(TAG_AT, TAG_AT + 8)
"""The bytes of a record that are its tag, little-endian: they cover key, generation and payload checksum."""

_ENTRIES_AT_ONCE = 4096
"""Entries of an index's file that are written while nothing is published: about 1 ms."""


class Spot(msgspec.Struct, frozen=True):
    """The slab and place of a record, and the tag that it must carry there.

    With a stamp, it is meant only as long as it was not used again. Of one that is not found yet `key` is its key.
    """

    slab: Slab
    place: int
    tag: int
    stamp: int = 0
    key: bytes = b""


class DiskRecords:
    """Records by key over slabs of several sizes.

    A key is in at most one slab. Two locks: `_changes` orders what is published and retired,
    so that files say what the indexes do; `lock` guards the indexes and is held for
    microseconds, never while a file is written. Whoever takes both takes `_changes` first.

    A file is written before a record is found and before its place is free again. So at any
    moment no file names a place that holds, or may soon hold, another record.
    """

    def __init__(self, slabs: Slabs) -> None:
        self.slabs = slabs
        self.recency = slabs.recency
        self.lock = threading.Lock()
        self.num_touches = 0
        """Uses that no file tells."""
        self._changes = threading.Lock()

    def __len__(self) -> int:
        return sum(len(slab.index) for slab in self._all())

    @property
    def num_bytes(self) -> int:
        """Bytes of the places that hold a record."""
        return sum(len(slab.index) * slab.record_bytes for slab in self._all())

    def find(self, keys: Sequence[bytes]) -> list[Spot | None]:
        """Return the spot of each key's record. The caller holds `lock`."""
        spots: list[Spot | None] = [None] * len(keys)
        for slab in self.slabs.values():
            for at, place in enumerate(slab.index.find_each(keys)):
                if place != NOWHERE:
                    spots[at] = Spot(slab, place, slab.index.generation_of(place))
        return spots

    def pinned(self, keys: Sequence[bytes]) -> list[Spot | None]:
        """Return the spot of each key's record; the bytes of all stay until `unpin`."""
        with self.lock:
            spots = self.find(keys)
            for spot in filter(None, spots):
                spot.slab.pin(spot.place)
            return spots

    def pins(self, spot: Spot) -> bool:
        """Return whether the record that was meant still lies there; then its bytes stay until `unpin`."""
        with self.lock:
            if still := is_there(spot):
                spot.slab.pin(spot.place)
            return still

    def keys_at(self, spots: Sequence[Spot]) -> list[tuple[Spot, bytes]]:
        """Return those spots where the record that was meant still lies, and its key."""
        with self.lock:
            return [(spot, spot.slab.index.key_of(spot.place)) for spot in spots if is_there(spot)]

    def unpin(self, spots: Sequence[Spot | None]) -> None:
        """Let places go that `pinned` or `pins` kept."""
        with self.lock:
            for spot in spots:
                if spot is not None:
                    spot.slab.unpin(spot.place)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return the keys that have a record: bool per key."""
        with self.lock:
            return self._are_there(keys)

    def touch(self, keys: Sequence[bytes]) -> tuple[int, list[bool]]:
        """Mark a prompt's records as just used, its head first, as far as they are there.

        Returns the head's stamp, and which are there; the stamps of the others fall by one each,
        there or not.
        """
        with self.lock:
            stamps = self.recency.falling(len(keys))
            self.num_touches += len(keys)
            there = np.zeros(len(keys), np.bool_)
            for slab in self.slabs.values():
                there |= slab.index.touch(keys, stamps)
            return self.recency.now, there.tolist()

    def commit(self, batch: Sequence[Spot]) -> list[bool]:
        """Let filled places be found; return for which of them another thread was faster.

        Raises `OSError` where a file cannot be written or is gone; then none of them is found.
        """
        with self._changes:
            with self.lock:
                late = self._are_there([each.key for each in batch])
                for each in compress(batch, late):
                    each.slab.index.release(each.place)
            entries: dict[Slab, list[tuple[int, int, int, bytes]]] = {}
            for each, is_late in zip(batch, late, strict=True):
                if not is_late:
                    own = entries.setdefault(each.slab, [])
                    own.append((each.place, each.tag, each.stamp, each.key))
            try:
                for slab, own in entries.items():
                    self.slabs.check_own(slab)
                    slab.index_file.write(own)
                    self.slabs.check_own(slab)
            except OSError:
                for slab, own in entries.items():
                    places = [entry[0] for entry in own]
                    with suppress(OSError):
                        slab.index_file.clear(places)
                    with self.lock:
                        slab.index.release(*places)
                raise
            with self.lock:
                for slab, own in entries.items():
                    places, tags, stamps, keys = zip(*own, strict=True)
                    slab.index.publish_all(places, keys, tags, stamps)
        return late

    def drop(self, spots: Sequence[Spot]) -> None:
        """Forget records, as far as they still lie there.

        Where files cannot be written they are forgotten all the same: a record that
        reappears after a restart is either what it says or carries another tag.
        """
        for start in range(0, len(spots), _AT_ONCE):
            some = spots[start : start + _AT_ONCE]
            self._retire(partial(filter, is_there, some))

    def drop_read(self, spots: Sequence[Spot]) -> None:
        """Forget records that were read at spots, which are pinned still, wherever they have moved since."""

        def now() -> list[Spot]:
            moved = [
                msgspec.structs.replace(spot, place=spot.slab.moved.get(spot.place, spot.place))
                for spot in spots
            ]
            return list(filter(is_there, moved))

        self._retire(now)

    def drop_keys(self, keys: Sequence[bytes]) -> None:
        """Forget the records of keys."""
        for start in range(0, len(keys), _AT_ONCE):
            self._retire(partial(self.find, keys[start : start + _AT_ONCE]))

    def drop_other_sizes(self, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
        """Forget those records of keys that have not the size given."""
        if len(set(sizes)) == 1 and self.slabs.keys() <= set(sizes):  # as a rule
            return

        def others() -> list[Spot]:
            pairs = zip(self.find(keys), sizes, strict=True)
            return [spot for spot, size in pairs if spot and spot.slab.record_bytes != size]

        self._retire(others)

    def _retire(self, choose: Callable[[], Iterable[Spot | None]]) -> None:
        """Forget what lies in the spots that are chosen under the lock, in the files first."""
        with self._changes:  # or what is chosen may move before it is dropped
            with self.lock:
                chosen = set(filter(None, choose()))
            # The lowest place is given out first again, so that a prompt's records lie in their order.
            spots = sorted(chosen, key=lambda spot: (spot.slab.record_bytes, -spot.place))
            for slab in {each.slab.record_bytes: each.slab for each in spots}.values():
                with suppress(OSError):
                    slab.index_file.clear([each.place for each in spots if each.slab is slab])
            with self.lock:
                for spot in spots:
                    spot.slab.retire(spot.place)

    def move(self, slab: Slab, copies: Sequence[tuple[Spot, int]]) -> list[tuple[Spot, int]]:
        """Let copies in reserved places of a slab be the records; return those that still were ones.

        The places that they leave stay reserved. Where the file of the index cannot be written, the
        records stay where they are.
        """
        moved: list[tuple[Spot, int]] = []
        for start in range(0, len(copies), _AT_ONCE):
            with self._changes:
                with self.lock:
                    some = [pair for pair in copies[start : start + _AT_ONCE] if is_there(pair[0])]
                    index = slab.index
                    entries = [
                        (to, spot.tag, index.stamp_of(spot.place), index.key_of(spot.place))
                        for spot, to in some
                    ]
                if not some:
                    continue
                # In this order: whenever the power goes, a record is in one of its places, or in both.
                try:
                    slab.index_file.write(entries)
                    slab.index_file.sync()
                    slab.index_file.clear([spot.place for spot, _ in some])
                except OSError:
                    break
                with self.lock:
                    for spot, to in some:
                        slab.move(spot.place, to)
            moved += some
        return moved

    def write_all(self) -> None:
        """Write all entries anew: the uses that no file tells, and what was damaged. Raises `OSError`."""
        self.num_touches = 0
        try:
            for slab in self._all():
                for start in range(0, slab.index.num_places, _ENTRIES_AT_ONCE):
                    with self._changes:
                        with self.lock:
                            stop = min(start + _ENTRIES_AT_ONCE, slab.index.num_places)
                            places = np.arange(start, stop)
                            tags = slab.index.generations_of(places)
                            stamps = slab.index.stamps[places]
                            keys = slab.index.keys_of(places)
                        slab.index_file.write_many(places, tags, stamps, keys)
        except OSError:
            self.num_touches = 1  # there is something left to do, and no hurry: it costs much
            raise

    def entries(self) -> Iterator[ListedRecord]:
        """List the records there are now; of one that goes meanwhile, too."""
        with self.lock:
            held = [(slab, slab.index.published()) for slab in self._all()]
            listed = [
                (slab.record_bytes, slab.index.keys_of(places), slab.index.stamps[places])
                for slab, places in held
            ]
        stamps = np.sort(np.concatenate([own for _, _, own in listed] or [np.zeros(0)]))

        def each() -> Iterator[ListedRecord]:
            for record_bytes, keys, own in listed:
                ages = len(stamps) - 1 - np.searchsorted(stamps, own)
                for key, age in zip(keys, ages.tolist(), strict=True):
                    yield ListedRecord(key.tobytes(), record_bytes, age)

        return each()

    def check(self) -> None:
        """Verify the indexes and that no key is in two; raises `InvariantError`."""
        with self.lock:
            slabs = self._all()
            words = [as_words(slab.index.keys_of(slab.index.published())) for slab in slabs]
            for slab in slabs:
                slab.check()
            if slabs and len(later_duplicates(np.concatenate(words))):
                raise InvariantError("a key lies in two slabs")

    def forget(self, slabs: Sequence[Slab]) -> None:
        """Forget slabs, and close their files when no call uses them any more."""
        with self._changes, self.lock:
            for slab in slabs:
                if self.slabs.get(slab.record_bytes) is slab:
                    del self.slabs[slab.record_bytes]
                    slab.close_later()

    def take_over(self, slabs: Slabs) -> None:
        """Let the records of other slabs be found, under the lock of their directory."""
        with self._changes, self.lock:
            self.slabs.lock = slabs.lock
            self.slabs.update(slabs)

    def close(self) -> None:
        """Close all files."""
        for slab in self._all():
            slab.close()

    def _all(self) -> list[Slab]:
        return list(self.slabs.values())

    def _are_there(self, keys: Sequence[bytes]) -> list[bool]:
        """Return the keys that have a record: bool per key. The lock is held."""
        there = [False] * len(keys)
        for slab in self.slabs.values():
            for at, place in enumerate(slab.index.find_each(keys)):
                there[at] |= place != NOWHERE
        return there


def runs_of(places: Sequence[Spot], most_bytes: int = RUN_BYTES) -> list[range]:
    """Return the runs of neighbours in a slab, of about so many bytes each at most, as ranges in `places`."""
    starts = [0] if places else []
    for at, (last, each) in enumerate(pairwise(places), 1):
        count = at - starts[-1]
        is_next = each.slab is last.slab and each.place == last.place + 1
        if not is_next or count >= _RUN_RECORDS or count * each.slab.record_bytes >= most_bytes:
            starts.append(at)
    return [range(*pair) for pair in pairwise([*starts, len(places)])]


def cached(spots: Sequence[Spot]) -> list[bool]:
    """Return which of these places the page cache has, as far as it is used and the system says so."""
    found: list[bool] = []
    for run in runs_of(spots, _LOOKED_FOR_BYTES):
        slab, first = spots[run.start].slab, spots[run.start].place
        if slab.has_cached(first, len(run)):
            found += [True] * len(run)
        elif len(run) > 1:
            found += [slab.has_cached(spots[at].place, 1) for at in run]
        else:
            found.append(False)
    return found


def is_there(spot: Spot) -> bool:
    """Return whether the record that was meant still lies there. The caller holds the lock."""
    index, place = spot.slab.index, spot.place
    if place >= index.num_places:
        return False
    stamp = index.stamp_of(place)
    return stamp > 0 and index.generation_of(place) == spot.tag and spot.stamp in (0, stamp)
