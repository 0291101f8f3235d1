"""The page cache under a disk tier: a burst of writes goes there first, and reads find there what it still has.

Everything else goes past it (O_DIRECT). So a record that was just stored, or that the system still has in memory, costs a copy; one that
is not there costs the disk's time and nobody's memory; and what waits to be written is bounded by the tier, not by the machine's memory.
"""

from __future__ import annotations

import os
import threading
from collections import Counter

_MOST_BYTES = 256 << 20
_SHARE_OF_MEMORY = 64


class PageCache:
    """How much of what a tier wrote waits in the page cache: never more than `limit_bytes`, whatever the record sizes.

    From half of it on, the tier writes it out in the background. Beyond the limit, writes go past the page cache.

    All counts grow only, so that several threads may write and write out at once. Of each size, in bytes:

        written out <= written <= taken; taken - written out == waiting
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._taken: Counter[int] = Counter()
        self._written: Counter[int] = Counter()
        self._written_out: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def is_behind(self) -> bool:
        """Whether so much waits that it is to be written out."""
        return 2 * self._waiting_bytes > self.limit_bytes

    def takes(self, record_bytes: int, count: int) -> bool:
        """Return whether so many records of a size may be written to the page cache: then they count as waiting.

        The caller says when it `wrote` them.
        """
        num_bytes = record_bytes * count
        with self._lock:
            if not self.has_room(num_bytes):
                return False
            self._taken[record_bytes] += num_bytes
            return True

    def wrote(self, record_bytes: int, count: int) -> None:
        """Say that so many records that were taken are in the page cache, or failed: what is written out from now on has them."""
        with self._lock:
            self._written[record_bytes] += record_bytes * count

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so many bytes more may wait."""
        return self._waiting_bytes + num_bytes <= self.limit_bytes

    def waiting(self, record_bytes: int) -> int:
        """Return the bytes of records of a size that may not be on the disk yet."""
        return self._taken[record_bytes] - self._written_out[record_bytes]

    def written(self, record_bytes: int) -> int:
        """Return the bytes of records of a size that were ever written to the page cache."""
        return self._written[record_bytes]

    def wrote_out(self, record_bytes: int, written: int) -> None:
        """Say that what was `written` when this began waits no more."""
        with self._lock:
            self._written_out[record_bytes] = max(self._written_out[record_bytes], written)

    @property
    def _waiting_bytes(self) -> int:
        return self._taken.total() - self._written_out.total()


def limit_here() -> int:
    """Return how much may wait on this machine: a small share of its memory, and 256 MiB at most."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_MOST_BYTES, memory // _SHARE_OF_MEMORY)
