"""Columns of an index: keys, the hash table that finds them (open addressing, linear probing), and stamps of use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.tiers.format import KEY_BYTES

Places: TypeAlias = NDArray[np.int64]
"""Indices of places."""

KEY_WORDS = KEY_BYTES // 8

NOWHERE = -1
"""What is found for a key that is not there: no index of a place."""


def filled_table(prefixes: NDArray[np.uint64], places: Places, capacity: int) -> NDArray[np.int32]:
    """Build a table for up to `capacity` places, at most two thirds full: int32 [2^n], place + 1 or 0.

    `prefixes` holds the first eight bytes of each place's key; its low bits say where it belongs. In
    that order, each entry goes there or right behind the one before.
    """
    mask = (1 << max(4, (capacity * 3 // 2).bit_length())) - 1
    table = np.zeros(mask + 1, np.int32)
    homes = (prefixes & np.uint64(mask)).astype(np.int64)
    order = np.argsort(homes)
    count = np.arange(len(places))
    probes = np.maximum.accumulate(homes[order] - count) + count
    inside = probes <= mask
    table[probes[inside]] = places[order[inside]] + 1
    over = places[order[~inside]]
    if len(over):  # goes on at the start, behind what is there
        table[np.flatnonzero(table == 0)[: len(over)]] = over + 1
    return table


def find_all(
    table: NDArray[np.int32], words: NDArray[np.uint64], wanted: NDArray[np.uint64]
) -> Places:
    """Return the place of each wanted key, uint64 [n, 4]; `NOWHERE` for a key that is absent.

    `table` is a hash table over `words`, the keys of all places.
    """
    mask = len(table) - 1
    found = np.full(len(wanted), NOWHERE, np.int64)
    open_ = np.arange(len(wanted))
    probes = (wanted[:, 0] & np.uint64(mask)).astype(np.int64)
    while len(open_):
        places = table[probes].astype(np.int64) - 1
        taken = places >= 0
        open_, probes, places = open_[taken], probes[taken], places[taken]
        same = (words[places] == wanted[open_]).all(axis=1)
        found[open_[same]] = places[same]
        open_, probes = open_[~same], (probes[~same] + 1) & mask
    return found


def drop_entry(table: memoryview[int], words: memoryview[int], place: int) -> None:
    """Take a place's entry out of a table and close the gap, so that probing needs no marks.

    `words` are those of the keys, `KEY_WORDS` for each place.
    """
    mask = len(table) - 1
    gap = words[place * KEY_WORDS] & mask
    while table[gap] != place + 1:
        gap = (gap + 1) & mask
    probe = gap
    while entry := table[probe := (probe + 1) & mask]:
        home = words[(entry - 1) * KEY_WORDS] & mask
        if (probe - home) & mask >= (probe - gap) & mask:
            table[gap] = entry
            gap = probe
    table[gap] = 0


def later_duplicates(words: NDArray[np.uint64]) -> Places:
    """Return the rows of keys [n, 4] that repeat an earlier row: int64, usually none."""
    prefixes = words[:, 0]
    in_order = np.sort(prefixes)
    if not (in_order[1:] == in_order[:-1]).any():
        return np.zeros(0, np.int64)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    seen: set[bytes] = set()
    later: list[int] = []
    for row in np.flatnonzero(np.isin(prefixes, repeated)).tolist():
        key = words[row].tobytes()
        if key in seen:
            later.append(row)
        seen.add(key)
    return np.array(later, np.int64)


def as_words(keys: Sequence[bytes] | NDArray[np.uint8]) -> NDArray[np.uint64]:
    """View keys as uint64 [n, 4]. Raises `ConfigError` where one has not 32 bytes."""
    if isinstance(keys, np.ndarray):
        return np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_WORDS)
    if any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(f"keys have {KEY_BYTES} bytes")
    return np.frombuffer(b"".join(keys), np.uint64).reshape(-1, KEY_WORDS)


def byte_view(array: Any) -> memoryview[int]:
    """View the bytes of an array."""
    return memoryview(array).cast("B") if len(array) else memoryview(b"")


class Recency:
    """A counter of uses, which several indexes may share so that their stamps compare."""

    def __init__(self) -> None:
        self.now = 0

    def take(self, count: int) -> int:
        """Take `count` stamps, newer than all before; return the newest."""
        self.now += count
        return self.now

    def falling(self, count: int) -> NDArray[np.int64]:
        """Take `count` stamps for a prompt's records, its head first: the head's is the newest."""
        newest = self.take(count)
        return np.arange(newest, newest - count, -1)


def oldest(stamps: NDArray[np.int64], count: int, before: int) -> NDArray[np.int64]:
    """Return up to `count` places with the lowest stamps above 0 and below `before`: int64, lowest first.

    Of many places it may return fewer than are there, but no other would have come before them.
    """
    end = before
    sample = stamps[:: max(1, len(stamps) // _SAMPLE)]
    if len(stamps) > 2 * _SAMPLE and len(sample := sample[sample > 0]) > _SAMPLE // 2:
        # All below a stamp are the oldest; a sample tells which stamp leaves about so many.
        rank = min(len(sample) - 1, count * len(sample) // int(np.count_nonzero(stamps)))
        end = min(before, int(np.partition(sample, rank)[rank]))
    places = np.flatnonzero((stamps > 0) & (stamps < end))
    if not len(places) and end < before:
        places = np.flatnonzero((stamps > 0) & (stamps < before))
    own = stamps[places]
    if count < len(places):
        chosen = np.argpartition(own, count)[:count]
        places, own = places[chosen], own[chosen]
    return places[np.argsort(own)]


_SAMPLE = 1 << 15
