"""Buffers for records, used again: fresh memory costs more than the copy into it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

from quire.tiers.format import PAGED_FROM


class _Pages(mmap.mmap):
    """Memory of a pool. `is_lent` from `take` until it comes back, so that twice does nothing."""

    is_lent: bool


class _Few(bytearray):
    """The same for less than `PAGED_FROM` bytes: a process may have some 65,000 maps, all in all."""

    is_lent: bool


class BufferPool:
    """Buffers by size; at most `limit_bytes` lie idle, what comes back beyond is freed.

    Counts as lent what nobody gave back, also where it was dropped: that is harmless.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.idle_bytes = 0
        self._idle: dict[int, list[memoryview]] = {}
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return writable buffers of these sizes with any content, large ones at the start of a page."""
        buffers: list[memoryview] = []
        with self._lock:
            for size in sizes:
                idle = self._idle.get(size)
                if idle:
                    buffer = idle.pop()
                    self.idle_bytes -= size
                else:
                    buffer = memoryview(_Pages(-1, size) if size >= PAGED_FROM else _Few(size))
                buffer.obj.is_lent = True  # type: ignore[reportAttributeAccessIssue] - of our making
                buffers.append(buffer)
        return buffers

    def give_back(self, buffers: Sequence[memoryview]) -> None:
        """Take buffers back that nobody reads or writes any more; others are left alone."""
        with self._lock:
            for buffer in buffers:
                pages = buffer.obj
                if not isinstance(pages, (_Pages, _Few)) or not pages.is_lent:
                    continue
                pages.is_lent = False
                size = len(buffer)
                if self.idle_bytes + size <= self.limit_bytes:
                    self._idle.setdefault(size, []).append(buffer)
                    self.idle_bytes += size
