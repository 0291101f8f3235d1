"""What is remembered about keys, in bounded memory: how often they were used, which tiers have them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Keys

Bits: TypeAlias = NDArray[np.uint8]

_MOST = 255


class KeyTable:
    """One byte for each of the keys that were set last; the others read as 0.

    Direct-mapped: a key's first 8 bytes say where it lies and the next 63 bits whether it is the one, so
    that two of a billion keys are mixed up once in 10^10 years of such tables; what is kept here is a
    hint anyway. All calls take whole prompts and are vectorised. Not thread-safe; its owner locks.
    """

    def __init__(self, num_slots: int) -> None:
        size = 1 << max(4, (num_slots - 1).bit_length())
        self._mask = np.uint64(size - 1)
        self._tags = np.zeros(size, np.uint64)
        self._values = np.zeros(size, np.uint8)

    def get(self, keys: Keys) -> Bits:
        """Return the byte of each key."""
        slots, tags = self._places(keys)
        return np.where(self._tags[slots] == tags, self._values[slots], np.uint8(0))

    def mark(self, keys: Keys, bit: int) -> None:
        """Set a bit (0 to 7) of each key."""
        slots, tags = self._places(keys)
        known = np.where(self._tags[slots] == tags, self._values[slots], np.uint8(0))
        self._tags[slots] = tags
        self._values[slots] = known | np.uint8(1 << bit)

    def clear(self, keys: Keys, bit: int) -> None:
        """Clear a bit of each key."""
        slots, tags = self._places(keys)
        slots = slots[self._tags[slots] == tags]
        self._values[slots] &= np.uint8(_MOST ^ (1 << bit))

    def count(self, keys: Keys) -> None:
        """Add 1 to each key's byte, up to 255.

        Where another key with a higher count than 1 has the place, that count falls by 1 instead:
        traffic that comes once does not make what comes often forgotten.
        """
        slots, tags = self._places(keys)
        values = self._values[slots]
        same = self._tags[slots] == tags
        kept = ~same & (values > 1)
        self._tags[slots] = np.where(kept, self._tags[slots], tags)
        more = np.where(values < _MOST, values + np.uint8(1), values)
        self._values[slots] = np.where(
            same, more, np.where(kept, values - np.uint8(1), np.uint8(1))
        )

    def _places(self, keys: Keys) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        words = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
        return words[:, 0] & self._mask, words[:, 1] | np.uint64(1)
