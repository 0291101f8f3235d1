"""A slab: recycled places of one size in a file, and the index of what lies in them, in memory and in a file."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.errors import InvariantError
from quire.tiers.disk.files import O_DIRECT, AlignedBuffers, DiskFiles
from quire.tiers.disk.index_file import IndexFile
from quire.tiers.format import HEADER_BYTES, PAGE_BYTES
from quire.tiers.places.index import PlaceIndex
from quire.tiers.places.recency import Recency

_ZEROS = memoryview(mmap.mmap(-1, 1 << 20)).toreadonly()


class Slab:
    """Places of `record_bytes` each; place i lies at byte i * record_bytes. The file has no head.

    `index`       what lies where, of the places that may be used: none before it is filled
    `index_file`  the same for the next process

    Reading and writing need no lock, the rest needs the owner's. A place that is being read
    (`pins`) and loses its record stays reserved (`leaving`) until the last reader is done, so
    nobody reads what is being written.
    """

    def __init__(
        self, files: DiskFiles, directory: Path, record_bytes: int, flags: int, recency: Recency
    ) -> None:
        self.record_bytes = record_bytes
        self.path = directory / f"slab-{record_bytes}.quire"
        self.pins: dict[int, int] = {}
        self.leaving: set[int] = set()
        self._files = files
        self._aligned = AlignedBuffers()
        own = flags if record_bytes % PAGE_BYTES == 0 else flags & ~O_DIRECT
        self.is_direct = bool(own & O_DIRECT)
        self.index = PlaceIndex(0, recency)
        self._descriptor = files.open(self.path, own)
        try:
            index_path = directory / f"index-{record_bytes}.quire"
            self.index_file = IndexFile(files, index_path, record_bytes, flags & ~O_DIRECT)
        except BaseException:
            files.close(self._descriptor)
            raise

    @property
    def num_bytes(self) -> int:
        """Bytes of all places, used or not."""
        return self.index.num_places * self.record_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of places that can be given out."""
        return self.index.num_free * self.record_bytes

    @property
    def places_in_file(self) -> int:
        """Places that the file has, whether they may be used or not."""
        return self._files.length(self._descriptor) // self.record_bytes

    def written_places(self) -> Iterator[range]:
        """Return the places whose start lies in no hole of the file."""
        size = self.record_bytes
        for start, end in self._files.data_ranges(self._descriptor, self.places_in_file * size):
            yield range(-(-start // size), -(-end // size))

    def read_header(self, place: int) -> memoryview:
        """Return the header that a place begins with, valid until the next. Raises `OSError`."""
        page = self._aligned.take(min(PAGE_BYTES, self.record_bytes))
        self._files.read_at(self._descriptor, page, place * self.record_bytes)
        return page[:HEADER_BYTES]

    def read(self, place: int, buffer: memoryview) -> bool:
        """Fill a buffer from a place; return whether the file had all of it. Raises `OSError`."""
        offset = place * self.record_bytes
        try:
            return self._files.read_at(self._descriptor, buffer, offset) == len(buffer)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL:
                raise
        aligned = self._aligned.take(len(buffer))
        is_whole = self._files.read_at(self._descriptor, aligned, offset) == len(buffer)
        buffer[:] = aligned
        return is_whole

    def write(self, place: int, record: memoryview) -> None:
        """Fill a place. Raises `OSError`."""
        offset = place * self.record_bytes
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

    def write_run(self, place: int, records: Sequence[memoryview]) -> None:
        """Fill neighbouring places from this one on. Raises `OSError`, with any of them written."""
        self._files.write_run(self._descriptor, records, place * self.record_bytes)

    def allocate(self, count: int) -> None:
        """Get disk space for more places and their entries; `index.grow` comes after. Raises `OSError`."""
        self.index_file.reserve(self.index.num_places + count)
        self._files.allocate(self._descriptor, self.num_bytes, count * self.record_bytes)

    def prewrite(self, count: int) -> None:
        """Do as `allocate` does, and write zeros there: writing over them later is several times faster.

        Raises `OSError` where that would leave the file system with less than as much again.
        """
        num_bytes = count * self.record_bytes
        if self._files.free_bytes(self._descriptor) < 2 * num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.index_file.reserve(self.index.num_places + count)
        at, end = self.num_bytes, self.num_bytes + count * self.record_bytes
        while at < end:
            some = _ZEROS[: end - at]
            self._files.write_at(self._descriptor, some, at)
            at += len(some)

    def cut(self) -> None:
        """Drop what the files have behind the last place; `index.shrink` comes before. Raises `OSError`."""
        self._files.truncate(self._descriptor, self.num_bytes)
        self.index_file.cut(self.index.num_places)

    def pin(self, place: int) -> None:
        """Keep a place's bytes as they are until `unpin`."""
        self.pins[place] = self.pins.get(place, 0) + 1

    def unpin(self, place: int) -> None:
        """End a `pin`."""
        self.pins[place] -= 1
        if not self.pins[place]:
            del self.pins[place]
            if place in self.leaving:
                self.leaving.discard(place)
                self.index.release(place)

    def retire(self, place: int) -> None:
        """Forget a place's record; the place is free once nobody reads it."""
        self.index.unpublish(place)
        self.release(place)

    def release(self, place: int) -> None:
        """Make a reserved place free, once nobody reads it."""
        if place in self.pins:
            self.leaving.add(place)
        else:
            self.index.release(place)

    def sync(self) -> None:
        """Return when what was written would survive a loss of power: records before their entries."""
        self._files.sync(self._descriptor)
        self.index_file.sync()

    def is_removed(self) -> bool:
        """Return whether somebody removed one of the files, so that nobody will find what it holds."""
        return self._files.is_removed(self._descriptor) or self.index_file.is_removed()

    def remove(self) -> None:
        """Close the files and remove them."""
        self.close()
        self._files.unlink(self.path)
        self._files.unlink(self.index_file.path)

    def check(self) -> None:
        """Verify the index; raises `InvariantError`."""
        self.index.check()
        if not self.leaving <= set(self.pins):
            raise InvariantError(f"{self.path}: places {self.leaving} wait for no reader")

    def close(self) -> None:
        """Close the files."""
        self._files.close(self._descriptor)
        self.index_file.close()


class Slabs(dict[int, Slab]):
    """The slabs of a directory that are open, by record size; their stamps compare.

    `flags`  what files are opened with
    """

    def __init__(self, files: DiskFiles, directory: Path, flags: int) -> None:
        super().__init__()
        self.directory = directory
        self.recency = Recency()
        self._files = files
        self._flags = flags

    def open(self, record_bytes: int) -> Slab:
        """Open a slab, which is in nobody's way yet. Raises `OSError`."""
        return Slab(self._files, self.directory, record_bytes, self._flags, self.recency)

    def sync(self) -> None:
        """Return when all that was written, and the names of the files, would survive a loss of power."""
        for slab in list(self.values()):
            slab.sync()
        self._files.sync_directory(self.directory)
