"""The page cache under a disk tier: it takes bursts of writes, and serves reads that it can.

All other reads and writes go past it (O_DIRECT). A record that was just stored, or that the system still has in
memory, costs a copy. A record that is not there costs the disk's time and no memory. The tier bounds the bytes that
wait to be written, not the machine's memory.
"""

from __future__ import annotations

import threading
from collections import Counter

from quire.config import memory_bytes

_MOST_BYTES = 256 << 20
_SHARE_OF_MEMORY = 64


class PageCache:
    """Bytes that a tier wrote and the system has not yet written out, at most `limit_bytes`.

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
        """Whether enough waits that it is to be written out."""
        return 2 * self._waiting_bytes > self.limit_bytes

    def takes(self, record_bytes: int, count: int) -> bool:
        """Return whether `count` records may be written to the page cache: then they count as waiting.

        The caller says when it `wrote` them.
        """
        num_bytes = record_bytes * count
        with self._lock:
            if not self.has_room(num_bytes):
                return False
            self._taken[record_bytes] += num_bytes
            return True

    def wrote(self, record_bytes: int, count: int) -> None:
        """Count `count` taken records as written to the page cache, or failed.

        A write-out that begins later covers them.
        """
        with self._lock:
            self._written[record_bytes] += record_bytes * count

    def has_room(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more may wait."""
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
    """Return how much may wait here: a small share of memory, and 256 MiB at most."""
    return min(_MOST_BYTES, memory_bytes() // _SHARE_OF_MEMORY)
