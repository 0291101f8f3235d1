"""An index of the prefixes that replicas hold, by tier, learnt from the events of their caches.

Its answers are advice where to send a request: a wrong one costs a miss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quire.config import check_count
from quire.core.tokens import IntArray
from quire.errors import InvariantError
from quire.exchange.wire import CacheEvent, ClearedEvent, RemovedEvent, StoredEvent
from quire_router.keys import ROOT, BlockKeys, grouped, names_of
from quire_router.numbers import Names, Numbers, NumberTable

DEVICE, HOST, STORAGE = range(3)
NUM_TIERS = 3
TIERS = {"GPU": DEVICE, "CPU": HOST, "CPU_PINNED": HOST}
"""Media by name; no name is the device, any other is storage."""

WINDOWED = ("sliding", "chunked", "mamba", "linear")
"""What the kinds of layer groups begin with that need not keep a whole prefix."""

_SHIFTS, _MOSTS = (0, 4, 6), (15, 3, 3)
"""Copies of a block by tier, in one byte: four bits for the device, two for each other."""

_FIELD = 21
"""Bits of a sum of blocks."""

Held: TypeAlias = dict[str, tuple[int, int, int]]
"""Tokens of a prompt that replicas hold from its first one on: on the device, in host memory, in storage."""


class Overlap(NamedTuple):
    """The cached part of a prompt. `numbers`: its blocks as the index numbers them, for `touch`."""

    held: Held
    numbers: Numbers


class _Replica:
    """A replica: its names of blocks, and how much of its events was seen."""

    def __init__(self, column: int, capacity: int) -> None:
        self.column = column
        self.table = NumberTable(capacity, 2)
        self.group: int | None = None
        self.has_group = False
        self.expected: int | None = None
        self.is_degraded = False


class ClusterIndex:
    """Prefixes and who holds them, of `capacity` distinct blocks at most.

        index = ClusterIndex(1 << 20)
        index.apply("http://a:8000", events, number)     # a batch, by its sequence number
        index.lookup(tokens).held                        # {"http://a:8000": (512, 0, 64)}

    A batch that is missing makes its replica *degraded* until `resync` or an `AllBlocksCleared`: it is
    still looked up, but may hold less than is said, or more. Batches that come a second time or late are
    passed over; number 0 after others is an engine that began anew. Stored blocks whose parent
    is not known cannot be placed and are left out, and so is what a replica stores in blocks of another
    size than the first one had, or for layers that do not keep a whole prefix.
    Where there is no room, the blocks not stored or touched for longest go, whoever holds them.

    After every call: free + known == capacity, a block is known while somebody holds it, and each
    replica has a name for exactly the blocks it holds. Raises `ConfigError`.
    """

    def __init__(self, capacity: int = 1 << 20, block_size: int | None = None) -> None:
        self.capacity = check_count("capacity", capacity, limit=1 << 28)
        self._made = None if block_size is None else BlockKeys(block_size)
        self.num_orphans = self.num_ignored = self.num_late = self.num_evicted = 0
        self._replicas: dict[str, _Replica] = {}
        self._keys = NumberTable(capacity, 4)
        self._copies = np.zeros((capacity, 8), np.uint8)  # [number, replica], see `_SHIFTS`
        self._holders = np.zeros(capacity, np.int32)
        self._depths = np.zeros(capacity, np.int32)
        self._stamps = np.zeros(capacity, np.int64)
        self._free = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._num_free = capacity
        self._clock = 1

    @property
    def block_size(self) -> int | None:
        """Tokens per block; None before anything was stored."""
        return None if self._made is None else self._made.block_size

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are known."""
        return self.capacity - self._num_free

    @property
    def replicas(self) -> dict[str, bool]:
        """The replicas that were heard of, each with whether it is degraded."""
        return {name: replica.is_degraded for name, replica in self._replicas.items()}

    def apply(self, name: str, events: Iterable[CacheEvent], number: int | None = None) -> None:
        """Take a batch of events of a replica; `number` is its sequence number, where it has one."""
        replica = self._replica(name)
        if number is not None and not self._follows(name, replica, number):
            self.num_late += 1
            return
        for event in grouped(events):
            if isinstance(event, list):
                self._store(replica, [each for each in event if self._is_followed(replica, each)])
            elif isinstance(event, RemovedEvent):
                if event.group_idx == replica.group:
                    self._remove(replica, event)
            elif isinstance(event, ClearedEvent):
                self._clear(replica)
                replica.is_degraded = False
            else:
                self.num_ignored += 1

    def resync(self, name: str, events: Iterable[CacheEvent], number: int = -1) -> None:
        """Replace all that is known of a replica by a snapshot.

        `number` is that of the last batch in the snapshot, -1 where batches have none.
        """
        self._clear(self._replica(name))
        self.apply(name, events)
        replica = self._replicas[name]
        replica.is_degraded = False
        replica.expected = number + 1

    def degrade(self, name: str, *, is_degraded: bool = True) -> None:
        """Note whether events of a replica were missed, where another looks at their numbers."""
        self._replica(name).is_degraded = is_degraded

    def forget(self, name: str) -> None:
        """Forget a replica and its contents; an unknown one is ignored."""
        if name in self._replicas:
            self._clear(self._replicas.pop(name))

    def lookup(
        self, tokens: IntArray, extra_keys: Sequence[Any] = (), lora_name: str | None = None
    ) -> Overlap:
        """Return who holds how much of a prompt, int32 [num_tokens]; nothing changes.

        `extra_keys` and `lora_name` as in events: of each block, in order, what its name is made of
        beside tokens; blocks behind the last have none.
        """
        if self._made is None:
            return Overlap({}, _NO_NUMBERS)
        numbers = self._keys.find(self._made.of_prompt(tokens, extra_keys, lora_name))
        unknown = numbers < 0
        if unknown.any():
            numbers = numbers[: int(unknown.argmax())]
        if not numbers.size:
            return Overlap({}, numbers)
        copies = self._copies.take(numbers, axis=0)
        words = copies.view(np.uint64)
        changes = np.flatnonzero(words[1:] != words[:-1]) // words.shape[1] + 1
        runs = np.concatenate(
            ([0], changes, [len(numbers)])
        )  # blocks that are held alike; some of none
        copies = copies.take(runs[:-1], axis=0)
        here = np.logical_and.accumulate(copies != 0, axis=0)
        lengths = np.diff(runs).astype(np.uint64)
        counts: list[int] = (lengths @ (_BEST[copies] * here)).tolist()
        most = (1 << _FIELD) - 1
        held: Held = {}
        size = self.block_size or 0
        for name, replica in self._replicas.items():
            if count := counts[replica.column]:
                host, storage = count >> _FIELD & most, count >> 2 * _FIELD
                held[name] = ((count & most) * size, host * size, storage * size)
        return Overlap(held, numbers)

    def touch(self, overlap: Overlap) -> None:
        """Note that a prompt was asked for: its blocks go last where there is no room."""
        self._stamp(overlap.numbers[self._holders[overlap.numbers] > 0])

    def check(self) -> None:
        """Raise `InvariantError` unless every law of this class holds. Takes as long as it is large."""
        known = np.sort(self._keys.named())
        free = self._free[: self._num_free]
        columns = [replica.column for replica in self._replicas.values()]
        others = np.delete(self._copies, columns, axis=1)
        laws = {
            "free + known == capacity": len(known) + len(free) == self.capacity,
            "no block is free and known": not np.isin(free, known).any(),
            "no block is twice": len(np.unique(known)) == len(known),
            "known is what is held": (np.flatnonzero(self._holders) == known).all(),
            "names find their numbers": (self._keys.find(self._keys.names[known]) == known).all(),
            "nobody else holds anything": not others.any(),
            "holders are counted": (
                (self._copies != 0).sum(axis=1, dtype=np.int32) == self._holders
            ).all(),
        }
        for name, replica in self._replicas.items():
            named, table = np.sort(replica.table.named()), replica.table
            held = np.flatnonzero(self._copies[:, replica.column])
            laws[f"{name} names what it holds"] = np.array_equal(named, held)
            laws[f"{name} finds them"] = (table.find(table.names[named]) == named).all()
        broken = [law for law, holds in laws.items() if not holds]
        if broken:
            raise InvariantError(f"the index is broken: {'; '.join(broken)}")

    # -- events ----------------------------------------------------------------------------

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            taken = {replica.column for replica in self._replicas.values()}
            column = next(at for at in range(len(taken) + 1) if at not in taken)
            if column == self._copies.shape[1]:
                self._copies = np.hstack((self._copies, np.zeros_like(self._copies)))
            self._replicas[name] = _Replica(column, self.capacity)
        return self._replicas[name]

    def _follows(self, name: str, replica: _Replica, number: int) -> bool:
        """Whether a batch is news, and not late; one that is early, or begins anew, leaves its mark."""
        expected = replica.expected
        if expected is not None and 0 < number < expected:
            return False
        if number == 0 and expected is not None:
            self._clear(replica)
        replica.is_degraded = number > (expected or 0) or (number > 0 and replica.is_degraded)
        replica.expected = number + 1
        return True

    def _is_followed(self, replica: _Replica, event: StoredEvent) -> bool:
        """Whether a stored event is of the layers that decide, in blocks of the index's size."""
        size, kind = event.block_size, event.kv_cache_spec_kind or ""
        if self._made is None and size >= 1:
            self._made = BlockKeys(size)
        is_whole = (
            size == self.block_size
            and len(event.token_ids) == size * len(event.block_hashes)
            and event.kv_cache_spec_sliding_window is None
            and not kind.startswith(WINDOWED)
        )
        if is_whole and not replica.has_group:
            replica.group, replica.has_group = event.group_idx, True
        is_followed = is_whole and event.group_idx == replica.group
        self.num_ignored += not is_followed
        return is_followed

    def _store(self, replica: _Replica, events: list[StoredEvent]) -> None:
        """Store events of one medium, none of which has its parent in another."""
        if not events or self._made is None:
            return
        above = replica.table.find(names_of(event.parent_block_hash or 0 for event in events))
        is_root = np.array([event.parent_block_hash is None for event in events])
        lost = ~is_root & (above < 0)
        if lost.any():
            self.num_orphans += sum(len(events[at].block_hashes) for at in np.flatnonzero(lost))
            events = [event for event, is_lost in zip(events, lost, strict=True) if not is_lost]
            above, is_root = above[~lost], is_root[~lost]
        names = names_of(each for event in events for each in event.block_hashes)
        if not names.size:
            return
        keys = np.where(is_root, ROOT, self._keys.names[above])
        depths = np.where(is_root, 0, self._depths[above] + 1)
        numbers = self._numbered(*self._made.of_events(events, keys, depths))
        tier = DEVICE if events[0].medium is None else TIERS.get(events[0].medium, STORAGE)
        self._hold(replica, numbers, names[: len(numbers)], tier)

    def _remove(self, replica: _Replica, event: RemovedEvent) -> None:
        numbers = replica.table.find(names_of(event.block_hashes))
        numbers, times = np.unique(numbers[numbers >= 0], return_counts=True)
        tier = DEVICE if event.medium is None else TIERS.get(event.medium, STORAGE)
        self._count(replica, numbers, tier, -times)
        self._release(replica, numbers[self._copies[numbers, replica.column] == 0])

    def _clear(self, replica: _Replica) -> None:
        held = np.flatnonzero(self._copies[:, replica.column])
        self._copies[:, replica.column] = 0
        self._release(replica, held)
        replica.has_group, replica.group = False, None

    # -- blocks ----------------------------------------------------------------------------

    def _numbered(self, keys: Names, depths: Numbers) -> Numbers:
        """Return the numbers of blocks, new ones where they have none: as many, from the first on, as there is room for."""
        numbers, begun = self._keys.find(keys), self._clock
        self._stamp(numbers[numbers >= 0])
        if not (numbers < 0).any():
            return numbers
        fresh, places = np.unique(keys[numbers < 0], return_index=True)
        if fresh.size > self._num_free:
            self._make_room(fresh.size, begun)
        if fresh.size > self._num_free:  # blocks of this very call fill the index
            at = np.sort(np.flatnonzero(numbers < 0)[places])[self._num_free]
            return self._numbered(keys[:at], depths[:at])
        given = self._free[self._num_free - fresh.size : self._num_free].astype(np.int64)
        self._num_free -= fresh.size
        self._depths[given] = depths[numbers < 0][places]
        self._keys.add(given, fresh)
        numbers[numbers < 0] = given[np.searchsorted(fresh, keys[numbers < 0])]
        self._stamp(numbers)
        return numbers

    def _hold(self, replica: _Replica, numbers: Numbers, names: Names, tier: int) -> None:
        """Note that a replica holds blocks under these names, one copy more of each."""
        numbers, places, times = np.unique(numbers, return_index=True, return_counts=True)
        _, single = np.unique(names[places], return_index=True)  # a name for two is for one of them
        if single.size < places.size:
            self._release_unheld(np.delete(numbers, single))
            single.sort()
            numbers, places, times = numbers[single], places[single], times[single]
        names = names[places]
        table = replica.table
        others = table.find(names)
        wrong = others[(others >= 0) & (others != numbers)]  # names that moved to other blocks
        table.remove(wrong)
        self._copies[wrong, replica.column] = 0
        self._holders[wrong] -= 1
        held = self._copies[numbers, replica.column] != 0
        renamed = held & (table.names[numbers] != names)
        table.remove(numbers[renamed])
        fresh = ~held | renamed
        table.add(numbers[fresh], names[fresh])
        self._holders[numbers[~held]] += 1
        self._count(replica, numbers, tier, times)
        self._release_unheld(wrong)

    def _count(self, replica: _Replica, numbers: Numbers, tier: int, times: Numbers) -> None:
        """Change how many copies of blocks a replica has in a tier: 0 at least, all that is counted at most."""
        shift, most = _SHIFTS[tier], _MOSTS[tier]
        copies = self._copies[numbers, replica.column].astype(np.int64)
        before = copies >> shift & most
        after = np.clip(before + times, 0, most)
        self._copies[numbers, replica.column] = copies + (after - before << shift)

    def _release(self, replica: _Replica, numbers: Numbers) -> None:
        """Give blocks up that a replica has no copy of any more."""
        replica.table.remove(numbers)
        self._holders[numbers] -= 1
        self._release_unheld(numbers)

    def _release_unheld(self, numbers: Numbers) -> None:
        gone = numbers[self._holders[numbers] == 0]
        if not gone.size:
            return
        self._keys.remove(gone)
        self._free[self._num_free : self._num_free + gone.size] = gone
        self._num_free += gone.size

    def _make_room(self, num_blocks: int, begun: int) -> None:
        """Drop the blocks that were not touched for longest, some more than are needed, but none touched since `begun`."""
        wanted = max(num_blocks - self._num_free, self.capacity // 16)
        old = np.flatnonzero((self._holders > 0) & (self._stamps <= begun))
        if wanted < old.size:
            old = old[np.argpartition(self._stamps[old], wanted)[:wanted]]
        self.num_evicted += old.size
        for replica in self._replicas.values():
            held = old[self._copies[old, replica.column] != 0]
            self._copies[held, replica.column] = 0
            self._release(replica, held)

    def _stamp(self, numbers: Numbers) -> None:
        """Note a use: a block is never older than those behind it."""
        self._clock += numbers.size
        self._stamps[numbers] = self._clock - np.arange(numbers.size)


def _best_tiers() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return one for the nearest tier of a block by its copies, in that tier's field, uint64 [256]."""
    best = np.zeros(256, np.uint64)
    for copies in range(1, 256):
        tiers = (tier for tier in range(NUM_TIERS) if copies >> _SHIFTS[tier] & _MOSTS[tier])
        best[copies] = 1 << (_FIELD * min(tiers))
    return best


_BEST, _NO_NUMBERS = _best_tiers(), np.empty(0, np.int64)
