"""The index of fixed places: the one of each key, and those used longest ago.

Arrays of fixed width, so that ten million records take about 60 bytes each and are loaded without a loop:

    keys         uint8  [places, 32]
    stamps       int64  [places]      when it was used last, by `Recency`; 0 where nothing is stored
    generations  uint64 [places]      whatever the owner wants to know a writing of a place by
    free         int32  [places]      a stack of places to give out
    table        int32  [2^n]        open addressing, linear probing: place + 1, or 0

A key is a SHA-256 already, so its first eight bytes say where the table has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfSlots, SlotError
from quire.tiers.format import KEY_BYTES
from quire.tiers.places.columns import (
    KEY_WORDS,
    NOWHERE,
    Places,
    Recency,
    as_words,
    drop_entry,
    filled_table,
    find_all,
    oldest,
)

_FEW_KEYS = 128
"""Below, one by one is faster, after a model has had the processor's caches."""

_PREFIX = Struct("=Q")
_MAX_SLOTS = (1 << 31) - 2


class PlaceIndex:
    """Keys of fixed places. Not thread-safe: its owner locks.

    A place is free, reserved (given out, not found yet) or published (found by its key):

        num_free + num_reserved + len == num_places
        a place is published  <=>  its stamp is above 0  <=>  exactly one table entry holds it

    A tail goes before its head as long as whoever uses a block uses all blocks before it: `touch` makes the
    head of a prompt newest, so the oldest records never include a head whose tail stays.
    """

    def __init__(self, num_places: int, recency: Recency | None = None) -> None:
        self.recency = recency if recency is not None else Recency()
        self.num_places = 0
        """Places in all. Read only."""
        self.num_free = 0
        """Places that `reserve` can give out. Read only."""
        self._num_published = 0
        self._leases: dict[int, float] = {}
        self._allocate(0)
        self.grow(num_places)

    @property
    def num_reserved(self) -> int:
        """Places that were given out and hold nothing that is found."""
        return self.num_places - self.num_free - self._num_published

    @property
    def stamps(self) -> NDArray[np.int64]:
        """View the stamps, [places]: 0 where nothing is published. Read only; valid until `grow`."""
        return self._stamps[: self.num_places]

    def stamp_of(self, place: int) -> int:
        """Return the stamp of a place; 0 where nothing is published."""
        return self._stamp_view[place]

    def __len__(self) -> int:
        return self._num_published

    def find(self, key: bytes) -> int:
        """Return the place of a key, or `NOWHERE`."""
        return self.find_each((key,))[0]

    def find_each(self, keys: Iterable[bytes]) -> list[int]:
        """Return the place of each key, or `NOWHERE`."""
        mask, table, held = self._mask, self._table_view, self._keys
        found: list[int] = []
        for key in keys:
            probe = _PREFIX.unpack_from(key)[0] & mask
            while entry := table[probe]:
                if held[(entry - 1) * KEY_BYTES : entry * KEY_BYTES] == key:
                    break
                probe = (probe + 1) & mask
            found.append(entry - 1)
        return found

    def find_many(self, keys: Sequence[bytes] | NDArray[np.uint8]) -> Places:
        """Return the place of each key, `NOWHERE` where there is none: int64 [keys].

        Takes keys one by one or as an array [keys, 32].
        """
        if len(keys) < _FEW_KEYS:
            return np.array(self.find_each(map(bytes, keys)), np.int64)
        return find_all(self._table, self._words, as_words(keys))

    def key_of(self, place: int) -> bytes:
        """Return the key that a published place holds. Raises `SlotError`."""
        self._check_published(place)
        return bytes(self._keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])

    def keys_of(self, places: Places) -> NDArray[np.uint8]:
        """Return a copy of the keys of places, uint8 [places, 32]; of use where they are published."""
        return self._words[places].view(np.uint8)

    def generation_of(self, place: int) -> int:
        """Return the generation that a place was published with; 0 before."""
        return self._generation_view[place]

    def generations_of(self, places: Places) -> NDArray[np.uint64]:
        """Return a copy of the generations of places, uint64 [places]."""
        return self._generations[places]

    def reserved(self) -> Places:
        """Return all places that are neither free nor published, ascending: int64."""
        taken = self.stamps == 0
        taken[self._free[: self.num_free]] = False
        return np.flatnonzero(taken)

    def published(self) -> Places:
        """Return all places that hold a record, ascending: int64."""
        return np.flatnonzero(self.stamps)

    def remove(self, *places: int) -> None:
        """Forget the records of places and free them. Raises `SlotError` for an empty place."""
        self.unpublish(*places)
        self.release(*places)

    def reserve(self) -> int:
        """Take a free place, to fill it before it can be found. Raises `OutOfSlots`."""
        if not self.num_free:
            total = self.num_places
            message = f"none of {total} places is free; remove records first"
            raise OutOfSlots(message, num_slots=total, busy=total, pinned=len(self._leases))
        return self.reserve_some(1)[0]

    def reserve_some(self, count: int) -> list[int]:
        """Take up to `count` free places."""
        before = self.num_free
        self.num_free = max(0, before - count)
        return self._free[self.num_free : before][::-1].tolist()

    def publish_all(
        self,
        places: Sequence[int],
        keys: Sequence[bytes],
        generations: Sequence[int],
        stamps: Sequence[int],
    ) -> None:
        """Let reserved places be found by their keys, as used when their stamps say.

        Raises `SlotError` at the first place that holds a record or whose key has another one, and
        `ConfigError` at a key that has not 32 bytes; those before it are published.
        """
        mask, table, held, used = self._mask, self._table_view, self._keys, self._stamp_view
        for place, key, generation, stamp in zip(places, keys, generations, stamps, strict=True):
            if not 0 <= place < self.num_places or used[place]:
                raise SlotError(f"place {place} of {self.num_places} is not there to be filled")
            if len(key) != KEY_BYTES:
                raise ConfigError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
            probe = _PREFIX.unpack_from(key)[0] & mask
            while entry := table[probe]:
                at = (entry - 1) * KEY_BYTES
                if held[at : at + KEY_BYTES] == key:
                    raise SlotError(f"the key {key.hex()} has place {entry - 1} already")
                probe = (probe + 1) & mask
            table[probe] = place + 1
            held[place * KEY_BYTES : (place + 1) * KEY_BYTES] = key
            self._generation_view[place] = generation
            used[place] = stamp
            self._num_published += 1

    def unpublish(self, *places: int) -> None:
        """Forget the records of places, which stay reserved. Raises `SlotError` at the first empty one."""
        for place in places:
            self._check_published(place)
            self._leases.pop(place, None)
            self._stamp_view[place] = 0
            self._num_published -= 1
            drop_entry(self._table_view, self._word_view, place)

    def release(self, *places: int) -> None:
        """Make reserved places free. Raises `SlotError` where one holds a record."""
        for place in places:
            if not (0 <= place < self.num_places and self.num_reserved) or self._stamp_view[place]:
                raise SlotError(f"place {place} of {self.num_places} is not reserved")
            self._free_view[self.num_free] = place
            self.num_free += 1

    def move(self, place: int, to: int) -> None:
        """Move the record of another place into a reserved one; the other stays reserved."""
        self._check_published(place)
        key, stamp, lease = self.key_of(place), self._stamp_view[place], self._leases.get(place)
        self.unpublish(place)
        self.publish_all((to,), (key,), (self.generation_of(place),), (stamp,))
        if lease is not None:
            self._leases[to] = lease

    def touch(self, keys: Sequence[bytes], stamps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark a prompt's records as used, the head's stamp first; return which are there: bool [keys].

        The stamps fall and are newer than all before, from `Recency.falling`: where a prompt lies in several
        indexes, each is told all of it.
        """
        places = self.find_many(keys)
        found = places != NOWHERE
        # The last of equal indices is kept, and where a prompt repeats a block the first counts.
        self._stamps[places[found][::-1]] = stamps[found][::-1]
        return found

    def lease(self, places: Sequence[int] | Places, until: float) -> None:
        """Keep published places out of `victims` until that time of its clock; a longer lease stays."""
        each = list(map(int, places))
        for place in each:
            self._check_published(place)
        for place in each:
            self._leases[place] = max(until, self._leases.get(place, until))

    def end_leases(self, places: Sequence[int] | Places) -> None:
        """Forget the leases of places, if there are any."""
        for place in map(int, places):
            self._leases.pop(place, None)

    def victims(self, count: int, now: float = 0.0, before: int | None = None) -> Places:
        """Return up to `count` places, used longest ago first: int64.

        None is leased beyond `now`, and all have stamps below `before`. Of very many places it may be a few less.
        """
        stamps = self.stamps
        self._leases = {place: until for place, until in self._leases.items() if until > now}
        if self._leases:
            stamps = stamps.copy()
            stamps[list(self._leases)] = 0
        return oldest(stamps, count, before if before is not None else self.recency.now + 1)

    def grow(self, num_places: int) -> None:
        """Add places, up to `num_places` in all."""
        if not 0 <= num_places <= _MAX_SLOTS:
            raise ConfigError(f"an index has 0 to {_MAX_SLOTS} places, got {num_places}")
        added = num_places - self.num_places
        if added < 0:
            raise ConfigError(f"cannot grow from {self.num_places} places to {num_places}")
        if num_places > len(self._stamps):
            self._allocate(num_places + (num_places // 4 if self.num_places else 0))
        new = np.arange(num_places - 1, self.num_places - 1, -1)
        self._free[self.num_free : self.num_free + added] = new
        self.num_free += added
        self.num_places = num_places

    def shrink(self, num_places: int) -> None:
        """Drop the places from `num_places` on. Raises `SlotError` where one of them is not free."""
        if not 0 <= num_places <= self.num_places:
            raise ConfigError(f"cannot shrink from {self.num_places} places to {num_places}")
        free = self._free[: self.num_free]
        kept = free[free < num_places]
        free_there, dropped = self.num_free - len(kept), self.num_places - num_places
        if free_there != dropped:
            raise SlotError(f"only {free_there} of the last {dropped} places are free")
        self.num_free = len(kept)
        self._free[: len(kept)] = kept
        self._words[num_places : self.num_places] = 0
        self.num_places = num_places
        if num_places < len(self._stamps) // 2:
            self._allocate(num_places)

    def reserve_within(self, first: int, stop: int, count: int) -> Places:
        """Take up to `count` free places from `first` on and before `stop`: int64."""
        free = self._free[: self.num_free]
        at = np.flatnonzero((free >= first) & (free < stop))[:count]
        taken, kept = free[at].astype(np.int64), np.delete(free, at)
        self.num_free = len(kept)
        free[: len(kept)] = kept
        return taken

    def wipe(self, places: Places) -> None:
        """Forget the keys that reserved places held last."""
        self._words[places] = 0
        self._generations[places] = 0

    def load(
        self,
        places: Places,
        keys: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        stamps: NDArray[np.int64],
    ) -> None:
        """Publish many places at once in an index that holds nothing.

        Arrays of equal length: places below `num_places`, keys [n, 32] that all differ, generations,
        stamps above 0. Raises `SlotError` where a place comes twice or a number is out of range.
        """
        if self.num_free != self.num_places:
            raise SlotError(f"{len(self)} places are published already; load into an empty index")
        words = as_words(keys)
        if not len(places) == len(words) == len(generations) == len(stamps):
            raise ConfigError("places, keys, generations and stamps must have one length")
        if not len(places):
            return
        if places.min() < 0 or places.max() >= self.num_places or stamps.min() < 1:
            raise SlotError(f"places must be below {self.num_places} and stamps above 0")
        taken = np.zeros(self.num_places, np.bool_)
        taken[places] = True
        if np.count_nonzero(taken) != len(places):
            raise SlotError("a place comes twice")
        self._words[places] = words
        self._generations[places] = generations
        self._stamps[places] = stamps
        self._num_published = len(places)
        self.num_free = self.num_places - len(places)
        self._free[: self.num_free] = np.flatnonzero(~taken)[::-1]
        self.recency.now = max(self.recency.now, int(stamps.max()))
        self._fill_table()

    def mend(self) -> None:
        """Let the laws of the class hold again after a call that was cut off anywhere.

        What is published stays so, and of the rest what is surely free: other places stay reserved.
        """
        self._stamps[self.num_places :] = 0
        self._num_published = int(np.count_nonzero(self._stamps))
        free = np.unique(self._free[: self.num_free])
        free = free[free < self.num_places]
        free = free[self._stamps[free] == 0][::-1]
        self._free[: len(free)], self.num_free = free, len(free)
        self._leases = {place: until for place, until in self._leases.items() if self.stamps[place]}
        self._fill_table()

    def check(self) -> None:
        """Verify the laws of the class; raises `InvariantError`."""
        places = self.published()
        free = self._free[: self.num_free]
        laws = {
            "as many stamps as published places": len(places) == self._num_published,
            "no reserved places below zero": self.num_reserved >= 0,
            "free places are there, once, and hold nothing": (
                len(np.unique(free)) == len(free)
                and not self._stamps[free].any()
                and bool((free < self.num_places).all())
            ),
            "one table entry per published place": np.count_nonzero(self._table) == len(places),
            "each key is found": bool((self.find_many(self.keys_of(places)) == places).all()),
            "nothing behind the last place": not self._stamps[self.num_places :].any(),
            "no stamp twice": len(np.unique(self._stamps[places])) == len(places),
            "no stamp from the future": not (self.stamps > self.recency.now).any(),
            "leases are of published places": all(
                self._stamp_view[place] for place in self._leases
            ),
        }
        if broken := [law for law, holds in laws.items() if not holds]:
            raise InvariantError(f"index of {self.num_places} places: {', '.join(broken)}")

    def _allocate(self, capacity: int) -> None:
        """Move into arrays of this many places, or one. What is never touched takes no memory."""
        capacity = max(capacity, 1)  # an empty array has no view
        kept = self.num_places
        # A slice of it is compared with a key; typed so, as the two types have no overlap.
        keys: Any = bytearray(capacity * KEY_BYTES)
        words = np.frombuffer(keys, np.uint64).reshape(-1, KEY_WORDS)
        stamps, generations = np.zeros(capacity, np.int64), np.zeros(capacity, np.uint64)
        free = np.zeros(capacity, np.int32)
        if kept:
            words[:kept], stamps[:kept] = self._words[:kept], self._stamps[:kept]
            generations[:kept] = self._generations[:kept]
            free[: self.num_free] = self._free[: self.num_free]
        # Nothing is called between these: a signal finds all arrays as they were, or all new.
        views = stamps.data, generations.data, free.data, memoryview(keys).cast("Q")
        self._keys, self._words, self._stamps, self._generations = keys, words, stamps, generations
        self._stamp_view, self._generation_view, self._free_view, self._word_view = views
        self._free = free
        self._fill_table()

    def _fill_table(self) -> None:
        """Build the table anew, of a size that fits the arrays."""
        places = np.flatnonzero(self._stamps)
        table = filled_table(self._words[places, 0], places, len(self._stamps))
        view: memoryview[Any] = table.data
        self._table, self._table_view, self._mask = table, view, len(view) - 1

    def _check_published(self, place: int) -> None:
        if not 0 <= place < self.num_places or not self._stamp_view[place]:
            raise SlotError(f"place {place} of {self.num_places} holds no record")
