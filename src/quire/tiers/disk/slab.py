"""A slab: one file of recycled slots of one size, and the index of what lies in them."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from quire.errors import InvariantError
from quire.tiers.disk.files import AlignedBuffers, DiskFiles
from quire.tiers.format import PAGE_BYTES
from quire.tiers.slots.index import SlotIndex
from quire.tiers.slots.recency import Recency

_ZEROS = memoryview(mmap.mmap(-1, 1 << 20)).toreadonly()


class Slab:
    """Slots of `record_bytes` each; slot i lies at byte i * record_bytes. The file has no head.

    Reading and writing need no lock, the rest needs the owner's. A slot that is being read
    (`pins`) and loses its record stays reserved (`leaving`) until the last reader is done, so
    nobody reads what is being written.
    """

    def __init__(
        self, files: DiskFiles, path: Path, record_bytes: int, recency: Recency, flags: int
    ) -> None:
        self.record_bytes = record_bytes
        self.path = path
        self.pins: dict[int, int] = {}
        self.leaving: set[int] = set()
        self._files = files
        self._aligned = AlignedBuffers()
        direct = getattr(os, "O_DIRECT", 0)
        if record_bytes % PAGE_BYTES:
            flags &= ~direct
        self.is_direct = bool(flags & direct)
        self._descriptor = files.open(path, flags)
        self.index = SlotIndex(os.fstat(self._descriptor).st_size // record_bytes, recency)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, used or not."""
        return self.index.num_slots * self.record_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of slots that can be given out."""
        return self.index.num_free * self.record_bytes

    def read(self, slot: int, buffer: memoryview) -> bool:
        """Fill a buffer from a slot; return whether the file had all of it. Raises `OSError`."""
        offset = slot * self.record_bytes
        try:
            return self._files.read_at(self._descriptor, buffer, offset) == len(buffer)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
        aligned = self._aligned.take(len(buffer))
        is_whole = self._files.read_at(self._descriptor, aligned, offset) == len(buffer)
        buffer[:] = aligned
        return is_whole

    def write(self, slot: int, record: memoryview) -> None:
        """Fill a slot. Raises `OSError`."""
        offset = slot * self.record_bytes
        try:
            self._files.write_at(self._descriptor, record, offset)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
        else:
            return
        aligned = self._aligned.take(len(record))
        aligned[:] = record
        self._files.write_at(self._descriptor, aligned, offset)

    def write_run(self, slot: int, records: Sequence[memoryview]) -> None:
        """Fill neighbouring slots from this one on. Raises `OSError`, with any of them written."""
        self._files.write_run(self._descriptor, records, slot * self.record_bytes)

    def allocate(self, count: int) -> None:
        """Get disk space for more slots; `index.grow` comes after. Raises `OSError`."""
        self._files.allocate(self._descriptor, self.num_bytes, count * self.record_bytes)

    def prewrite(self, count: int) -> None:
        """Write zeros behind the last slot: writing over them later is several times faster."""
        at, end = self.num_bytes, self.num_bytes + count * self.record_bytes
        while at < end:
            some = _ZEROS[: end - at]
            self._files.write_at(self._descriptor, some, at)
            at += len(some)

    def cut(self) -> None:
        """Drop what the file has behind the last slot; `index.shrink` comes before. Raises `OSError`."""
        self._files.truncate(self._descriptor, self.num_bytes)

    def pin(self, slot: int) -> None:
        """Keep a slot's bytes as they are until `unpin`."""
        self.pins[slot] = self.pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """End a `pin`."""
        self.pins[slot] -= 1
        if not self.pins[slot]:
            del self.pins[slot]
            if slot in self.leaving:
                self.leaving.discard(slot)
                self.index.release(slot)

    def retire(self, slot: int) -> None:
        """Forget a slot's record; the slot is free once nobody reads it."""
        self.index.unpublish(slot)
        self.release(slot)

    def release(self, slot: int) -> None:
        """Make a reserved slot free, once nobody reads it."""
        if slot in self.pins:
            self.leaving.add(slot)
        else:
            self.index.release(slot)

    def sync(self) -> None:
        """Return when what was written would survive a loss of power."""
        self._files.sync(self._descriptor)

    def check(self) -> None:
        """Verify the index; raises `InvariantError`."""
        self.index.check()
        if not self.leaving <= set(self.pins):
            raise InvariantError(f"{self.path}: slots {self.leaving} wait for no reader")

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._descriptor)
