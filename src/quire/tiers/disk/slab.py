"""A slab: recycled places of one size in a file, with an index in memory and in a file."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from weakref import finalize

from quire.errors import InvariantError
from quire.tiers.disk.files import O_DIRECT, AlignedBuffers, DirectoryLock, DiskFiles, zero
from quire.tiers.disk.index_file import IndexFile
from quire.tiers.disk.page_cache import PageCache
from quire.tiers.format import HEADER_BYTES, PAGE_BYTES
from quire.tiers.places.columns import Recency
from quire.tiers.places.index import PlaceIndex

_ZEROS = memoryview(mmap.mmap(-1, 4 << 20)).toreadonly()


class Slab:
    """Places of `record_bytes` each; place i lies at byte i * record_bytes. The file has no head.

    `index`       what lies where, of the places that may be used: none before it is filled
    `index_file`  the same for the next process

    Past the page cache (`is_direct`), but for what `cache` takes and what the system still has there; all by it where the files or the record size
    know no other way.

    Reading and writing need no lock, the rest needs the owner's. A place that is being read
    (`pins`) and loses its record stays reserved (`leaving`) until the last reader is done, so
    nobody reads what is being written; `moved` says where its record is, if that moved.
    """

    def __init__(self, slabs: Slabs, record_bytes: int) -> None:
        files, flags = slabs.files, slabs.flags
        self.record_bytes = record_bytes
        self.path = slabs.directory / f"slab-{record_bytes}.quire"
        self.pins: dict[int, int] = {}
        self.leaving: set[int] = set()
        self.moved: dict[int, int] = {}
        self._files = files
        self._aligned = AlignedBuffers()
        own = flags if record_bytes % PAGE_BYTES == 0 else flags & ~O_DIRECT
        self.is_direct = bool(own & O_DIRECT)
        self.index = PlaceIndex(0, slabs.recency)
        with ExitStack() as opened:
            self._descriptor = files.open(self.path, own)
            opened.callback(os.close, self._descriptor)
            self._cache, self._cached = slabs.cache if self.is_direct else None, -1
            if self._cache is not None:
                self._cached = files.open(self.path, own & ~O_DIRECT)
                opened.callback(os.close, self._cached)
            self.index_file = slabs.index_file(record_bytes, flags)
            opened.pop_all()

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
        return os.fstat(self._descriptor).st_size // self.record_bytes

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

    def read(self, place: int, *buffers: memoryview) -> bool:
        """Fill buffers from places, from this one on; return whether the file had all of them. Raises `OSError`."""
        try:
            return self._read(self._descriptor, place, buffers)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL or len(buffers) != 1:
                raise
        aligned = self._aligned.take(self.record_bytes)
        try:
            is_whole = self._read(self._descriptor, place, (aligned,))
            buffers[0][:] = aligned
        finally:
            zero(aligned)
        return is_whole

    def read_cached(self, place: int, *buffers: memoryview) -> bool:
        """Do as `read` does, by the page cache."""
        return self._read(self._cached, place, buffers)

    def _read(self, descriptor: int, place: int, buffers: Sequence[memoryview]) -> bool:
        offset, num_bytes = place * self.record_bytes, len(buffers) * self.record_bytes
        if len(buffers) > 1:
            return self._files.read_run(descriptor, buffers, offset) == num_bytes
        return self._files.read_at(descriptor, buffers[0], offset) == num_bytes

    def has_cached(self, place: int, count: int) -> bool:
        """Return whether `read_cached` finds all of `count` places, from this one on, in memory."""
        size = self.record_bytes
        return self._cache is not None and self._files.is_cached(
            self._cached, place * size, count * size
        )

    def write(self, place: int, *records: memoryview) -> None:
        """Fill places, from this one on. Raises `OSError`, with any of them written."""
        offset = place * self.record_bytes
        if self._cache is not None and self._cache.takes(self.record_bytes, len(records)):
            try:
                self._write(self._cached, offset, records)
            finally:
                self._cache.wrote(self.record_bytes, len(records))
            return
        try:
            self._write(self._descriptor, offset, records)
        except OSError as error:
            if not self.is_direct or error.errno != errno.EINVAL or len(records) != 1:
                raise
        else:
            return
        aligned = self._aligned.take(self.record_bytes)
        try:
            aligned[:] = records[0]
            self._files.write_at(self._descriptor, aligned, offset)
        finally:
            zero(aligned)

    def _write(self, descriptor: int, offset: int, records: Sequence[memoryview]) -> None:
        if len(records) > 1:
            self._files.write_run(descriptor, records, offset)
        else:
            self._files.write_at(descriptor, records[0], offset)

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
        at = self.num_bytes
        end = at + num_bytes
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
            self.moved.pop(place, None)
            if place in self.leaving:
                self.leaving.discard(place)
                self.index.release(place)

    def move(self, place: int, to: int) -> None:
        """Move the record of another place into a reserved one; the other stays reserved."""
        self.index.move(place, to)
        if place in self.pins:  # until it is read nothing below it moves again
            self.moved[place] = to

    def retire(self, place: int) -> None:
        """Forget a place's record; the place is free once no thread reads it."""
        self.index.unpublish(place)
        self.moved = {was: at for was, at in self.moved.items() if at != place}
        self.release(place)

    def release(self, place: int) -> None:
        """Make a reserved place free, once no thread reads it."""
        if place in self.pins:
            self.leaving.add(place)
        else:
            self.index.release(place)

    def sync(self) -> None:
        """Return when earlier writes would survive a loss of power: records before their entries."""
        self._write_out(self._descriptor)
        self.index_file.sync()

    def write_out(self) -> None:
        """Return when nothing waits in the page cache that waited there before; what cannot be written `sync` says."""
        if self._cache is not None and self._cache.waiting(self.record_bytes):
            with suppress(OSError):  # the system says it once for each time that a file was opened
                self._write_out(self._cached)

    def _write_out(self, descriptor: int) -> None:
        written = self._cache.written(self.record_bytes) if self._cache is not None else 0
        try:
            self._files.sync(descriptor)
        finally:
            if self._cache is not None:
                self._cache.wrote_out(self.record_bytes, written)

    @property
    def goes_past_cache(self) -> bool:
        """Whether the next write goes past the page cache."""
        return self.is_direct and not (
            self._cache is not None and self._cache.has_room(self.record_bytes)
        )

    def is_removed(self) -> bool:
        """Return whether another process removed one of the files, so that its records are lost."""
        return self._files.are_removed(self._descriptor, self.index_file.descriptor)

    def remove(self) -> None:
        """Close the files and remove them."""
        self.close()
        if self._cache is not None:
            self._cache.wrote_out(self.record_bytes, self._cache.written(self.record_bytes))
        self._files.unlink(self.path)
        self._files.unlink(self.index_file.path)

    def mend(self) -> None:
        """Make the index fit for use after a call that was cut off anywhere."""
        self.leaving &= set(self.pins)
        self.moved.clear()
        self.index.mend()

    def check(self) -> None:
        """Verify the index; raises `InvariantError`."""
        self.index.check()
        if not self.leaving <= set(self.pins):
            raise InvariantError(f"{self.path}: places {self.leaving} wait for no reader")
        if not self.moved.keys() <= self.pins.keys():
            raise InvariantError(f"{self.path}: nobody reads the places that {self.moved} left")

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)

    def close_later(self) -> None:
        """Close the files when no call uses them any more: until then no other file may get their numbers."""
        for descriptor in self._descriptors:
            finalize(self, os.close, descriptor)

    @property
    def _descriptors(self) -> list[int]:
        descriptors = [self._descriptor, self._cached, self.index_file.descriptor]
        return [each for each in descriptors if each >= 0]


class Slabs(dict[int, Slab]):
    """The slabs of a directory that are open, by record size; their stamps compare.

    `flags`  what files are opened with
    `cache`  what may wait in the page cache; None: nothing that need not
    `lock`   held on the directory, so that files are made in no other one; None for who only reads
    """

    def __init__(
        self,
        files: DiskFiles,
        directory: Path,
        flags: int,
        cache: PageCache | None = None,
        lock: DirectoryLock | None = None,
    ) -> None:
        super().__init__()
        self.directory = directory
        self.recency = Recency()
        self.files = files
        self.flags = flags
        self.cache = cache
        self.lock = lock

    def beside(self, lock: DirectoryLock) -> Slabs:
        """Return slabs of a directory that has the name of this one now, none of them open yet."""
        slabs = Slabs(self.files, self.directory, self.flags, self.cache, lock)
        slabs.recency = self.recency
        return slabs

    def open(self, record_bytes: int) -> Slab:
        """Open a slab, which is in nobody's way yet. Raises `OSError`."""
        self._check_lock()
        return Slab(self, record_bytes)

    def check_own(self, slab: Slab) -> None:
        """Raise `OSError` where what is written to a slab would be found by nobody, or by another process."""
        if self.lock is not None:
            self.lock.check_file()
        if self.get(slab.record_bytes) is not slab or slab.is_removed():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(slab.path))

    def index_path(self, record_bytes: int) -> Path:
        """Return where the index of a slab is."""
        return self.directory / f"index-{record_bytes}.quire"

    def index_file(self, record_bytes: int, flags: int) -> IndexFile:
        """Open the file of an index. Raises `OSError`."""
        path = self.index_path(record_bytes)
        return IndexFile(self.files, path, record_bytes, flags & ~O_DIRECT)

    def sync(self) -> None:
        """Return when all that was written, and the names of the files, would survive a loss of power."""
        for slab in list(self.values()):
            slab.sync()
        self._check_lock()
        self.files.sync_directory(self.directory)

    def _check_lock(self) -> None:
        if self.lock is not None:
            self.lock.check()
