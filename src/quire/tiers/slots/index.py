"""Where each key's record lies among fixed slots, and which were used longest ago.

Arrays of fixed width, so that ten million records take about 60 bytes each and are loaded
without a loop:

    keys         uint8  [slots, 32]
    stamps       int64  [slots]      when it was used last, by `Recency`; 0 where nothing is stored
    generations  uint64 [slots]      whatever the owner wants to know a writing of a slot by
    free         int32  [slots]      a stack of slots to give out
    table        int32  [2^n]        open addressing, linear probing: slot + 1, or 0

A key is a SHA-256 already, so its first eight bytes are its place in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError, InvariantError, OutOfSlots, SlotError
from quire.tiers.format import KEY_BYTES
from quire.tiers.slots.key_table import (
    KEY_WORDS,
    Slots,
    as_words,
    drop_entry,
    element_view,
    filled_table,
    later_duplicates,
)
from quire.tiers.slots.recency import Leases, Recency, oldest

NOWHERE = -1
"""What `find` returns for a key that is not there: no index of a slot."""

_PREFIX = Struct("=Q")
_MAX_SLOTS = (1 << 31) - 2


class SlotIndex:
    """Keys of fixed slots. Not thread-safe: its owner locks.

    A slot is free, reserved (given out, not found yet) or published (found by its key):

        num_free + num_reserved + len == num_slots
        a slot is published  <=>  its stamp is above 0  <=>  exactly one table entry holds it

    A tail goes before its head as long as every use of a block is a use of all blocks before
    it: `touch` makes the head of a prompt newest, so the oldest records never include a head
    whose tail stays.
    """

    def __init__(self, num_slots: int, recency: Recency | None = None) -> None:
        self.recency = recency if recency is not None else Recency()
        self._num_slots = self._num_free = self._num_published = 0
        self._leases = Leases()
        self._allocate(0)
        self.grow(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """Slots that `reserve` can give out."""
        return self._num_free

    @property
    def num_reserved(self) -> int:
        """Slots that were given out and hold nothing that is found."""
        return self._num_slots - self._num_free - self._num_published

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays, used or not."""
        arrays = (self._words, self._stamps, self._generations, self._free, self._table)
        return sum(array.nbytes for array in arrays)

    @property
    def stamps(self) -> NDArray[np.int64]:
        """View the stamps, [slots]: 0 where nothing is published. Read only; valid until `grow`."""
        return self._stamps[: self._num_slots]

    def stamp_of(self, slot: int) -> int:
        """Return one of these."""
        return self._stamp_view[slot]

    def __len__(self) -> int:
        return self._num_published

    def find(self, key: bytes) -> int:
        """Return the slot of a key, or `NOWHERE`."""
        mask, table, keys = self._mask, self._table_view, self._keys
        place = _PREFIX.unpack_from(key)[0] & mask
        while entry := table[place]:
            at = (entry - 1) * KEY_BYTES
            if keys[at : at + KEY_BYTES] == key:
                return entry - 1
            place = (place + 1) & mask
        return NOWHERE

    def find_many(self, keys: Sequence[bytes] | NDArray[np.uint8]) -> Slots:
        """Return the slot of each key, `NOWHERE` where there is none: int64 [keys].

        Takes keys one by one or as an array [keys, 32]; worth it from about 16 keys on.
        """
        wanted = as_words(keys)
        found = np.full(len(wanted), NOWHERE, np.int64)
        open_ = np.arange(len(wanted))
        places = (wanted[:, 0] & np.uint64(self._mask)).astype(np.int64)
        while len(open_):
            slots = self._table[places].astype(np.int64) - 1
            taken = slots >= 0
            open_, places, slots = open_[taken], places[taken], slots[taken]
            same = (self._words[slots] == wanted[open_]).all(axis=1)
            found[open_[same]] = slots[same]
            open_, places = open_[~same], (places[~same] + 1) & self._mask
        return found

    def key_of(self, slot: int) -> bytes:
        """Return the key that a published slot holds. Raises `SlotError`."""
        self._check_published(slot)
        return bytes(self._keys[slot * KEY_BYTES : (slot + 1) * KEY_BYTES])

    def keys_of(self, slots: Slots) -> NDArray[np.uint8]:
        """Return a copy of the keys of slots, uint8 [slots, 32]; of use where they are published."""
        return self._words[slots].view(np.uint8)

    def generation_of(self, slot: int) -> int:
        """Return the generation that a slot was published with; 0 before."""
        return self._generation_view[slot]

    def generations_of(self, slots: Slots) -> NDArray[np.uint64]:
        """Return a copy of the generations of slots, uint64 [slots]."""
        return self._generations[slots]

    def reserved(self) -> Slots:
        """Return all slots that are neither free nor published, ascending: int64."""
        taken = self.stamps == 0
        taken[self._free[: self._num_free]] = False
        return np.flatnonzero(taken)

    def published(self) -> Slots:
        """Return all slots that hold a record, ascending: int64."""
        return np.flatnonzero(self.stamps)

    def remove(self, *slots: int) -> None:
        """Forget what slots hold and make them free. Raises `SlotError` where one holds nothing."""
        self.unpublish(*slots)
        self.release(*slots)

    def reserve(self) -> int:
        """Take a free slot, to fill it before it can be found. Raises `OutOfSlots`."""
        if not self._num_free:
            total = self._num_slots
            message = f"none of {total} slots is free; remove records first"
            raise OutOfSlots(message, num_slots=total, busy=total, pinned=len(self._leases))
        return self.reserve_some(1)[0]

    def reserve_some(self, count: int) -> list[int]:
        """Take as many free slots, or all there are."""
        before = self._num_free
        self._num_free = max(0, before - count)
        return self._free[self._num_free : before][::-1].tolist()

    def publish(self, slot: int, key: bytes, generation: int = 0, stamp: int | None = None) -> None:
        """Do `publish_all` for one slot; as just used, unless a stamp says when."""
        when = self.recency.now + 1 if stamp is None else stamp
        self.publish_all((slot,), (key,), (generation,), (when,))
        self.recency.now = max(self.recency.now, when)

    def publish_all(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        generations: Sequence[int],
        stamps: Sequence[int],
    ) -> None:
        """Let reserved slots be found by their keys, as used when their stamps say.

        Raises `SlotError` at the first slot that holds a record or whose key has another one, and
        `ConfigError` at a key that has not 32 bytes; those before it are published.
        """
        mask, table, held, used = self._mask, self._table_view, self._keys, self._stamp_view
        for slot, key, generation, stamp in zip(slots, keys, generations, stamps, strict=True):
            if not 0 <= slot < self._num_slots or used[slot]:
                raise SlotError(f"slot {slot} of {self._num_slots} is not there to be filled")
            if len(key) != KEY_BYTES:
                raise ConfigError(f"a key has {KEY_BYTES} bytes, got {len(key)}")
            place = _PREFIX.unpack_from(key)[0] & mask
            while entry := table[place]:
                at = (entry - 1) * KEY_BYTES
                if held[at : at + KEY_BYTES] == key:
                    raise SlotError(f"the key {key.hex()} has slot {entry - 1} already")
                place = (place + 1) & mask
            table[place] = slot + 1
            held[slot * KEY_BYTES : (slot + 1) * KEY_BYTES] = key
            self._generation_view[slot] = generation
            used[slot] = stamp
            self._num_published += 1

    def unpublish(self, *slots: int) -> None:
        """Forget what slots hold; they stay reserved. Raises `SlotError` at the first that holds nothing."""
        self._leases.end(slots)
        for slot in slots:
            self._check_published(slot)
            self._stamp_view[slot] = 0
            self._num_published -= 1
            drop_entry(self._table_view, self._word_view, slot)

    def release(self, *slots: int) -> None:
        """Make reserved slots free. Raises `SlotError` where one holds a record."""
        for slot in slots:
            if not (0 <= slot < self._num_slots and self.num_reserved) or self._stamp_view[slot]:
                raise SlotError(f"slot {slot} of {self._num_slots} is not reserved")
            self._free_view[self._num_free] = slot
            self._num_free += 1

    def move(self, slot: int, to: int) -> None:
        """Let a reserved slot hold what another one holds, which stays reserved."""
        self._check_published(slot)
        key, stamp = self.key_of(slot), self._stamp_view[slot]
        self._leases.move(slot, to)
        self.unpublish(slot)
        self.publish(to, key, self.generation_of(slot), stamp)

    def touch(self, slots: Sequence[int] | Slots, stamps: NDArray[np.int64] | None = None) -> None:
        """Mark slots as just used, the head of a prompt first: it becomes the newest.

        Slots that hold nothing are left out. Where a prompt lies in several indexes, their
        owner gives the stamps, from `Recency.falling`.
        """
        each = np.asarray(slots, dtype=np.int64)
        stamps = self.recency.falling(len(each)) if stamps is None else stamps
        used = self._stamps[each] > 0
        # The last of equal indices is kept, and where a prompt repeats a block the first counts.
        self._stamps[each[used][::-1]] = stamps[used][::-1]

    def restamp(self, slot: int, stamp: int) -> None:
        """Mark one published slot as used then, if it was not used later."""
        self._check_published(slot)
        self._stamp_view[slot] = max(stamp, self._stamp_view[slot])

    def lease(self, slots: Sequence[int] | Slots, until: float) -> None:
        """Keep published slots out of `victims` until that time of its clock; a longer lease stays."""
        for slot in (each := list(map(int, slots))):
            self._check_published(slot)
        self._leases.extend(each, until)

    def end_leases(self, slots: Sequence[int] | Slots) -> None:
        """Forget the leases of slots, if there are any."""
        self._leases.end(map(int, slots))

    def is_leased(self, slot: int, now: float) -> bool:
        """Return whether a slot is leased beyond `now`."""
        return self._leases.is_active(slot, now)

    def victims(self, count: int, now: float = 0.0, before: int | None = None) -> Slots:
        """Return up to `count` slots, used longest ago first: int64.

        Without those leased beyond `now`, and only ones with stamps below `before`. Of very
        many slots it may return a few less than `count`.
        """
        stamps = self.stamps
        if leased := self._leases.active(now):
            stamps = stamps.copy()
            stamps[leased] = 0
        return oldest(stamps, count, before if before is not None else self.recency.now + 1)

    def grow(self, num_slots: int) -> None:
        """Add slots, up to `num_slots` in all."""
        if not 0 <= num_slots <= _MAX_SLOTS:
            raise ConfigError(f"an index has 0 to {_MAX_SLOTS} slots, got {num_slots}")
        added = num_slots - self._num_slots
        if added < 0:
            raise ConfigError(f"cannot grow from {self._num_slots} slots to {num_slots}")
        if num_slots > len(self._stamps):
            self._allocate(num_slots + (num_slots // 4 if self._num_slots else 0))
        new = np.arange(num_slots - 1, self._num_slots - 1, -1)
        self._free[self._num_free : self._num_free + added] = new
        self._num_free += added
        self._num_slots = num_slots

    def shrink(self, num_slots: int) -> None:
        """Drop the slots from `num_slots` on. Raises `SlotError` where one of them is not free."""
        if not 0 <= num_slots <= self._num_slots:
            raise ConfigError(f"cannot shrink from {self._num_slots} slots to {num_slots}")
        free = self._free[: self._num_free]
        kept = free[free < num_slots]
        free_there, dropped = self._num_free - len(kept), self._num_slots - num_slots
        if free_there != dropped:
            raise SlotError(f"only {free_there} of the last {dropped} slots are free")
        self._num_free = len(kept)
        self._free[: len(kept)] = kept
        self._num_slots = num_slots
        if num_slots < len(self._stamps) // 2:
            self._allocate(num_slots)

    def reserve_within(self, first: int, stop: int, count: int) -> Slots:
        """Take up to `count` free slots from `first` on and before `stop`: int64."""
        free = self._free[: self._num_free]
        at = np.flatnonzero((free >= first) & (free < stop))[:count]
        taken, kept = free[at].astype(np.int64), np.delete(free, at)
        self._num_free = len(kept)
        free[: len(kept)] = kept
        return taken

    def load(
        self,
        slots: Slots,
        keys: NDArray[np.uint8],
        generations: NDArray[np.uint64],
        stamps: NDArray[np.int64],
    ) -> None:
        """Publish many slots at once in an index that holds nothing.

        Arrays of equal length: slots below `num_slots`, keys [n, 32], generations, stamps above
        0. Raises `SlotError` where a slot or a key comes twice or a number is out of range.
        """
        if self._num_free != self._num_slots:
            raise SlotError(f"{len(self)} slots are published already; load into an empty index")
        words = as_words(keys)
        if not len(slots) == len(words) == len(generations) == len(stamps):
            raise ConfigError("slots, keys, generations and stamps must have one length")
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self._num_slots or stamps.min() < 1:
            raise SlotError(f"slots must be below {self._num_slots} and stamps above 0")
        taken = np.zeros(self._num_slots, np.bool_)
        taken[slots] = True
        if np.count_nonzero(taken) != len(slots) or len(later_duplicates(words)):
            raise SlotError("a slot or a key comes twice")
        self._words[slots] = words
        self._generations[slots] = generations
        self._stamps[slots] = stamps
        self._num_published = len(slots)
        self._num_free = self._num_slots - len(slots)
        self._free[: self._num_free] = np.flatnonzero(~taken)[::-1]
        self.recency.now = max(self.recency.now, int(stamps.max()))
        self._fill_table()

    def check(self) -> None:
        """Verify the laws of the class; raises `InvariantError`."""
        slots = self.published()
        free = self._free[: self._num_free]
        laws = {
            "as many stamps as published slots": len(slots) == self._num_published,
            "no reserved slots below zero": self.num_reserved >= 0,
            "free slots are there, once, and hold nothing": (
                len(np.unique(free)) == len(free)
                and not self._stamps[free].any()
                and bool((free < self._num_slots).all())
            ),
            "one table entry per published slot": np.count_nonzero(self._table) == len(slots),
            "each key is found": bool((self.find_many(self.keys_of(slots)) == slots).all()),
            "nothing behind the last slot": not self._stamps[self._num_slots :].any(),
            "no stamp twice": len(np.unique(self._stamps[slots])) == len(slots),
            "no stamp from the future": not (self.stamps > self.recency.now).any(),
            "leases are of published slots": bool(self._stamps[self._leases.slots()].all()),
        }
        if broken := [law for law, holds in laws.items() if not holds]:
            raise InvariantError(f"index of {self._num_slots} slots: {', '.join(broken)}")

    def _allocate(self, capacity: int) -> None:
        """Move into arrays of this many slots. What is never touched takes no memory."""
        kept, old = self._num_slots, self.__dict__.copy()
        # A slice of it is compared with the key; typed so, as the two types have no overlap.
        self._keys: Any = bytearray(max(capacity, 1) * KEY_BYTES)
        self._words = np.frombuffer(self._keys, np.uint64).reshape(-1, KEY_WORDS)
        self._stamps = np.zeros(capacity, np.int64)
        self._generations = np.zeros(capacity, np.uint64)
        self._free = np.zeros(capacity, np.int32)
        if kept:
            for name in ("_words", "_stamps", "_generations"):
                getattr(self, name)[:kept] = old[name][:kept]
            self._free[: self._num_free] = old["_free"][: self._num_free]
        self._word_view: Any = memoryview(self._keys).cast("Q")
        self._stamp_view = element_view(self._stamps)
        self._generation_view = element_view(self._generations)
        self._free_view = element_view(self._free)
        self._fill_table()

    def _fill_table(self) -> None:
        """Build the table anew, of a size that fits the arrays."""
        slots = np.flatnonzero(self._stamps)
        self._table = filled_table(self._words[slots, 0], slots, len(self._stamps))
        self._mask = len(self._table) - 1
        self._table_view = element_view(self._table)

    def _check_published(self, slot: int) -> None:
        if not 0 <= slot < self._num_slots or not self._stamp_view[slot]:
            raise SlotError(f"slot {slot} of {self._num_slots} holds no record")
