"""The calls to the operating system that the disk tier makes, in one place so that tests can fail each."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np

from quire.errors import TierBusy, TierError
from quire.tiers.directory import Access, Descriptor, InTheWay, open_file
from quire.tiers.format import PAGE_BYTES

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
"""The flag of files that are read and written past the page cache; 0 where there is none."""

_DIGITS = bytes(range(ord("0"), ord("9") + 1)) + b" \n"
"""What a lock has in it, if anything."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk, or a quota, is full."""
    return error.errno in _FULL


def is_forbidden(error: OSError) -> bool:
    """Return whether an error says that nothing may be written here."""
    return error.errno in _READ_ONLY


def _system_call() -> Callable[[int, int, Any, Any, int], int] | None:
    """Return the C library's `syscall`; called so, it keeps the interpreter, as what takes a microsecond should."""
    if sys.platform != "linux":
        return None
    call: Any = ctypes.PyDLL(None).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
    return call


_CACHESTAT = 451
"""The number of `cachestat` on every machine; Linux 6.5 and later."""

_Range, _Told = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5


_call_system = _system_call()


class DiskFiles:
    """Reads and writes, whole or with an error. Threads share one: it knows only the rights of new files, `access`."""

    access = Access()

    def open(self, path: Path, flags: int) -> int:
        """Open a file, never what a link leads to. Raises `OSError`, and `TierError` where something else has its name."""
        try:
            return open_file(os.fspath(path), flags, access=self.access)
        except InTheWay as error:
            raise TierError(
                f"{error}; where an index is missing, records are found by their own headers"
            ) from None

    def read_at(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        """Fill a buffer; return the bytes read, fewer where the file ends."""
        done = os.preadv(descriptor, [buffer], offset)
        while 0 < done < len(buffer):
            more = os.preadv(descriptor, [buffer[done:]], offset + done)
            if not more:
                break
            done += more
        return done

    def read_run(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers from bytes behind each other; return the bytes read, fewer where the file ends or the system stops."""
        return os.preadv(descriptor, buffers, offset)

    def is_cached(self, descriptor: int, offset: int, num_bytes: int) -> bool:
        """Return whether the page cache has all of a range now; False where the system does not say."""
        asked, told = _Range(offset, num_bytes), _Told()
        if _call_system is None or _call_system(_CACHESTAT, descriptor, asked, told, 0):
            return False
        first, last = offset // PAGE_BYTES, (offset + num_bytes - 1) // PAGE_BYTES
        return told[0] > last - first

    def write_at(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Write all of the data."""
        done = os.pwrite(descriptor, data, offset)
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], offset + done)

    def write_run(self, descriptor: int, parts: Sequence[memoryview], offset: int) -> None:
        """Write parts behind each other: one call of the system costs as much for many pages as for a few."""
        done = os.pwritev(descriptor, parts, offset)
        for part in parts:
            if done < len(part):
                self.write_at(descriptor, part[max(done, 0) :], offset + max(done, 0))
            offset += len(part)
            done -= len(part)

    def allocate(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Reserve disk space, so that a later write cannot find the disk full."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, offset, num_bytes)
        else:
            os.ftruncate(descriptor, offset + num_bytes)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut a file."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Return when the file's content would survive a loss of power."""
        os.fdatasync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return when the names of its files would survive a loss of power."""
        with Descriptor(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as folder:
            os.fsync(folder)

    def data_ranges(self, descriptor: int, end: int) -> Iterator[tuple[int, int]]:
        """Return where a file has anything but holes before `end`: first byte and the one behind the last."""
        start = 0
        while start < end:
            try:
                start = os.lseek(descriptor, start, os.SEEK_DATA)
                stop = min(end, os.lseek(descriptor, start, os.SEEK_HOLE))
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return
                stop = end
            if start < stop:
                yield start, stop
            start = stop

    def are_removed(self, *descriptors: int) -> bool:
        """Return whether one of these files is in no directory any more."""
        return not all(os.fstat(each).st_nlink for each in descriptors)

    def free_bytes(self, descriptor: int) -> int:
        """Return the bytes that the file system has left."""
        system = os.fstatvfs(descriptor)
        return system.f_bavail * system.f_frsize

    def unlink(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


class AlignedBuffers(threading.local):
    """A page-aligned buffer for each thread, for records that O_DIRECT cannot take in place."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return a buffer of this size, valid until this thread takes another."""
        if len(self._buffer) < num_bytes:
            self._buffer = memoryview(mmap.mmap(-1, num_bytes))
        return self._buffer[:num_bytes]


def zero(buffer: memoryview) -> None:
    """Overwrite a buffer that held a record: it outlives the record."""
    np.frombuffer(buffer, np.uint8)[:] = 0


class DirectoryLock:
    """A directory that one process writes to: held until `release`, or until the process is gone.

    The directory itself is locked, so that it stays so when somebody removes the file `lock`; and that file, for file
    systems that lock no directories. It says the number of the process. A forked process has no share in it: whether
    that lives on makes no difference to who opens the directory next.

    Raises `TierBusy` where another process holds it, `OSError` where it cannot be had.
    """

    def __init__(self, directory: Path, files: DiskFiles) -> None:
        self._directory = directory
        self._path = directory / "lock"
        self._files = files
        self._descriptors = [os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        _held.add(self)
        try:
            self.locks_directory = self._locks(self._descriptors[0])
            self._take_file()
        except BaseException:
            self.forget()
            raise

    def check(self) -> None:
        """Raise `OSError` where the directory that has this name now is another one: this one was moved or removed."""
        if not self.is_here:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._directory))

    @property
    def is_here(self) -> bool:
        """Whether the directory still has its name. Raises `OSError`."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptors[0]), self._directory.stat())
        return False

    def renew(self) -> None:
        """Make the file anew, if somebody removed or replaced it. Raises `OSError`, and `TierBusy` where another process has it."""
        if not self._has_file:
            os.close(self._descriptors.pop())
            self._take_file()

    def release(self) -> None:
        """Let another process have the directory. Twice does nothing."""
        for descriptor in self._descriptors:
            with suppress(OSError):  # though forked processes still have the files open
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        self.forget()

    def forget(self) -> None:
        """Close the files. The lock is held as long as any other process has them open. Twice does nothing."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def check_file(self) -> None:
        """Raise `OSError` where another process may have the directory, as the file that is locked is another one now."""
        if not self.locks_directory and not self._has_file:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self._path))

    @property
    def _has_file(self) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._descriptors[1]), self._path.lstat())
        return False

    def _take_file(self) -> None:
        descriptor = self._files.open(self._path, os.O_RDWR | os.O_CREAT)
        self._descriptors.append(descriptor)
        if os.pread(descriptor, 64, 0).strip(_DIGITS):
            raise TierError(str(InTheWay(str(self._path))))
        if not self._locks(descriptor) and not self.locks_directory:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(self._path))
        with suppress(OSError):  # on a full disk nobody is told the number
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)

    def _locks(self, descriptor: int) -> bool:
        """Lock an open file or directory; return False where the system locks none."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise TierBusy(
                f"{self._directory} is open for writing in process {self._owner()}; give each "
                "process its own directory, share a Files tier, or open this one with read_only=True"
            ) from None
        return True

    def _owner(self) -> str:
        """Return the number of the process that has the directory, as far as the file says it."""
        with (
            suppress(OSError, TierError),
            Descriptor(self._files.open(self._path, os.O_RDONLY)) as file,
        ):
            return os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
        return "unknown"


_held: WeakSet[DirectoryLock] = WeakSet()


def _forget_all() -> None:
    """Leave the locks to the parent, so that they end with it."""
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


def takes_direct(directory: Path) -> bool:
    """Return whether files here can mix O_DIRECT with page-cache reads and writes, by trying it.

    On a full disk, return whether they can be opened with O_DIRECT.
    """
    pages = [memoryview(mmap.mmap(-1, PAGE_BYTES)) for _ in range(2)]
    back = memoryview(mmap.mmap(-1, PAGE_BYTES))
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            for page, way in zip(pages, (O_DIRECT, 0), strict=True):
                page[:] = os.urandom(PAGE_BYTES)
                fcntl.fcntl(file, fcntl.F_SETFL, flags | way)
                is_whole = os.pwrite(file.fileno(), page, 0) == PAGE_BYTES
                fcntl.fcntl(file, fcntl.F_SETFL, flags | (O_DIRECT ^ way))
                is_whole &= os.preadv(file.fileno(), [back], 0) == PAGE_BYTES
                if not is_whole or back != page:
                    return False
            return bool(O_DIRECT)
    except OSError as error:
        return bool(O_DIRECT) and is_full(error)
