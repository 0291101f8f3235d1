"""A byte per key, in bounded memory: uses of a block, or the tiers that have it."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Keys

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = NDArray[np.intp]
Words: TypeAlias = NDArray[np.uint64]

WAYS = 8
_MOST = 255
_WORDS = Struct("<2Q")

FEW_KEYS = 32
"""Up to so many are looked up faster one by one."""


class KeyTable:
    """One byte for each of about `num_keys` keys; a key that is not remembered reads as 0.

    A key's first 8 bytes say in which bucket of `WAYS` places it may lie, and the next 63 bits whether it
    does. Where a bucket is full, the key with the lowest byte gives way. What is kept here is a hint: two keys
    that are taken for one, once in 2^63 pairs of a bucket, do no harm.

    All calls take whole prompts and are vectorised, where these are not short. Not thread-safe; its owner locks.
    """

    def __init__(self, num_keys: int) -> None:
        num_buckets = 1 << max(1, (max(num_keys, 1) // WAYS - 1).bit_length())
        self._num_buckets = num_buckets
        self._mask = np.uint64(num_buckets - 1)
        self._tags = np.zeros((num_buckets, WAYS), np.uint64)
        self._values = np.zeros((num_buckets, WAYS), np.uint8)

    def get(self, keys: Keys) -> Bytes:
        """Return the byte of each key."""
        if len(keys) <= FEW_KEYS:
            return np.array([self._byte(key) for key in keys], np.uint8)
        buckets, tags = self._words(keys)
        is_there, ways = self._find(buckets, tags)
        return np.where(is_there, self._values[buckets, ways], np.uint8(0))

    def forget(self) -> None:
        """Forget all keys."""
        self._tags[:], self._values[:] = 0, 0

    def mark(self, keys: Keys, bit: int) -> None:
        """Set a bit (0 to 7) of each key."""
        one = np.uint8(1 << bit)
        self._change(keys, lambda values: values | one, lambda values: np.full_like(values, one))

    def clear(self, keys: Keys, bit: int) -> None:
        """Clear a bit of each key."""
        if not keys:
            return
        buckets, tags = self._words(keys)
        is_there, ways = self._find(buckets, tags)
        self._values[buckets[is_there], ways[is_there]] &= np.uint8(_MOST ^ (1 << bit))

    def count(self, keys: Keys) -> None:
        """Add 1 to each key's byte, up to 255.

        Where all places of a bucket have higher counts than 1, the lowest falls by 1 instead: traffic that comes
        once does not make what comes often forgotten.
        """

        def more(values: Bytes) -> Bytes:
            return np.where(values < _MOST, values + np.uint8(1), values)

        def first(values: Bytes) -> Bytes:
            return np.where(values > 1, values - np.uint8(1), np.uint8(1))

        self._change(keys, more, first, most_replaced=1)

    def _change(
        self,
        keys: Keys,
        known: Callable[[Bytes], Bytes],
        new: Callable[[Bytes], Bytes],
        most_replaced: int = _MOST,
    ) -> None:
        """Set the bytes of keys from what they are: of those remembered, and of the places of new ones.

        A new key takes a place whose byte is at most `most_replaced`; else only the byte changes.
        """
        if not keys:
            return
        buckets, tags = self._words(keys)
        is_there, ways = self._find(buckets, tags)
        at = (buckets[is_there], ways[is_there])
        self._values[at] = known(self._values[at])
        rest = np.flatnonzero(~is_there)
        while len(rest):
            # Those that would take the same place go one after the other.
            bucket, tag = buckets[rest], tags[rest]
            again, ways = self._find(bucket, tag)
            ways = np.where(again, ways, self._lowest(bucket, tag))
            _, now = np.unique(bucket * WAYS + ways, return_index=True)
            at = (bucket[now], ways[now])
            values = self._values[at]
            takes = ~again[now] & (values <= most_replaced)
            self._tags[at] = np.where(takes, tag[now], self._tags[at])
            self._values[at] = np.where(again[now], values, new(values))
            rest = np.delete(rest, now)

    def _byte(self, key: bytes) -> int:
        bucket, tag = _WORDS.unpack_from(key)
        bucket &= self._num_buckets - 1
        tags: list[int] = self._tags[bucket].tolist()
        return self._values.item(bucket, tags.index(tag | 1)) if tag | 1 in tags else 0

    def _find(self, buckets: Indices, tags: Words) -> tuple[NDArray[np.bool_], Indices]:
        same = self._tags[buckets] == tags[:, None]
        ways = same.argmax(axis=1)
        return same[np.arange(len(ways)), ways], ways

    def _lowest(self, buckets: Indices, tags: Words) -> Indices:
        """Return the way with the lowest byte; of several, another one for each key."""
        turn = (np.arange(WAYS) - tags[:, None].astype(np.int64) // 2) % WAYS
        return (self._values[buckets].astype(np.int64) * WAYS + turn).argmin(axis=1)

    def _words(self, keys: Keys) -> tuple[Indices, Words]:
        words = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
        return (words[:, 0] & self._mask).astype(np.intp), words[:, 1] | np.uint64(1)
