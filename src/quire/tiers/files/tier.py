"""A tier of one file per record, named by its key: for directories that many processes share."""

# A Path per record would cost more than the system call.

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from quire.config import parse_bytes
from quire.errors import RecordError, TierError
from quire.tiers.addresses import directory_of
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.deadlines import in_time
from quire.tiers.directory import (
    MARKER,
    Descriptor,
    InTheWay,
    TierDirectory,
    create_file,
    make_folder,
    open_file,
    open_folder,
)
from quire.tiers.files import unfinished
from quire.tiers.files.clock import STEP_NS, SharedClock
from quire.tiers.files.room import (
    FilesRoom,
    folder_of,
    name_of,
    size_of,
    status_of,
    unlink,
    walk,
)
from quire.tiers.format import HEADER_BYTES, read_header
from quire.tiers.purging import Purge

STALE_S = 3600.0
"""Unfinished files that are this old have lost their writer."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_GONE = {errno.ENOENT, errno.ESTALE, errno.EXDEV}
_READ_ONLY = {errno.EROFS}

_log = logging.getLogger(__name__)


class Files(Tier):
    """Files `path/ab/<key>.quire`, each holding one record, written elsewhere and renamed.

    Any number of processes and machines may share the directory: a file is there whole or not
    at all, and two that write the same key write the same content. A machine that loses power may leave a
    file with parts missing; its reader finds out and deletes it.

    With a `capacity` each process deletes the files used longest ago, 5 % in one go. It learns of the
    others' files by listing the directory each time it has written 5 % itself: one process never exceeds
    the capacity, each other one may add 10 % of it and a record. Uses are kept as modification times in the time
    of the file system, the head of a prompt newest; without a capacity they are not written.

    A directory that is emptied while it is open becomes a new, empty tier: a put makes anew what is missing.
    Names that are not quire's are never read, written or deleted (`quire.tiers.directory`).

    A system call that hangs on a dead server cannot be interrupted; timeouts are looked at between records.

    `path`       a directory; it is made if it is not there. Raises `TierError` where it cannot be written
    `capacity`   "200GiB" or a number of bytes; None: as much as there is room for
    `group`      name or number of a group whose members share the directory; None: as its marker says, at first the owner alone
    `read_only`  nothing is written, every put is `SKIPPED`; so it is on a read-only file system in any case
    `clock`      seconds since the epoch, read once: the time until the file system has told its own
    """

    is_local = False
    marks_purges = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: str | int | None = None,
        *,
        group: str | int | None = None,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
        name: str = "files",
    ) -> None:
        super().__init__()
        self.name = name
        num_bytes = None if capacity is None else parse_bytes(capacity)
        self.path = directory_of(path)
        self._root = os.fspath(self.path)
        self._unfinished = f"{self._root}/unfinished"
        self._directory = TierDirectory(self.path, "files", group)
        self._clock = SharedClock(clock)
        self._closed = False
        self._renewing = threading.Lock()
        self.is_read_only = read_only
        self._open()
        self.drops_damaged = not self.is_read_only
        self._room = None
        if num_bytes is not None and not self.is_read_only:
            try:
                self._room = FilesRoom(self._root, num_bytes, self._clock.now_ns)
            except OSError as error:
                raise TierError(f"cannot list {self._root}: {error.strerror or error}") from error

    @property
    def num_renewed(self) -> int:
        """Times the directory was emptied or replaced while open, and was begun anew."""
        return self._directory.num_renewed

    def touch(self, keys: Keys) -> None:
        if self._room is None or self._closed:
            return
        newest = self._clock.stamps(len(keys))
        for index, key in enumerate(keys):
            stamp = newest - index * STEP_NS
            with contextlib.suppress(OSError):
                folder = open_folder(folder_of(self._root, key))
                try:
                    os.utime(name_of(key), ns=(stamp, stamp), dir_fd=folder, follow_symlinks=False)
                finally:
                    os.close(folder)

    def scan(self) -> Iterator[ListedRecord]:
        """List the files, those used last first. Raises `TierError` where that fails."""
        try:
            listed = sorted(walk(self._root), reverse=True)
        except OSError as error:
            raise TierError(f"cannot list {self._root}: {error}") from error
        for age, (_, num_bytes, key) in enumerate(listed):
            yield ListedRecord(key, num_bytes, age)

    def close(self) -> None:
        self._closed = True
        if self._room is not None:
            self._room.close()

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        for index in self._each(keys, timeout_s):
            self._read(keys[index], index, buffers[index], answers)

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        if self.is_read_only:
            return
        deadline = time.monotonic() + timeout_s
        if not os.path.lexists(self._directory.path / MARKER):
            self._renew()
        newest = self._clock.stamps(len(keys))
        # What is there of this prompt already must not make room for the rest of it.
        spared = self._room.sparing(keys) if self._room else None
        try:
            self.touch(keys)
            for index in self._each(keys, timeout_s):
                stamp = newest - index * STEP_NS
                done[index] = self._write(keys[index], records[index], stamp, deadline)
        finally:
            del spared  # whoever keeps this frame does not keep it
        if Outcome.PRESENT in done:
            self.touch(keys)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        found = [False] * len(keys)
        with contextlib.suppress(TimeoutError):
            for index in self._each(keys, timeout_s):
                with contextlib.suppress(InTheWay):
                    found[index] = status_of(self._root, keys[index]) is not None
        return found

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        if self.is_read_only:
            return
        for index in self._each(keys, timeout_s):
            self._unlink(keys[index])

    def _purge(self, purge: Purge) -> None:
        """Delete the files of a tag, and those that are being written.

        They are not overwritten: a reader may have one open, and a file system may write elsewhere anyway.
        """
        folders = {folder_of(self._root, each.key) for each in self._listed_of(purge)}
        super()._purge(purge)
        unfinished.delete_of(self._unfinished, purge.tag)
        for folder in (*folders, self._unfinished):
            unfinished.sync(folder)

    def _read_mark(self, name: str, timeout_s: float) -> bytes:
        return unfinished.read_mark(self._unfinished, name)

    def _set_mark(self, name: str, timeout_s: float) -> None:
        if self.is_read_only:
            raise TierError(f"{self._root} is opened to read only: nothing of it is purged")
        unfinished.set_mark(self._unfinished, name, self._directory.access)

    def _unlink(self, key: bytes, only: os.stat_result | None = None) -> None:
        """Delete a file, unless it is gone or another than `only`. Raises `OSError`."""
        if self._room is not None:
            self._room.remove(key, only=only)
        else:
            unlink(self._root, key, lambda status: only is None or os.path.samestat(status, only))

    def _size(self) -> tuple[int, int, int]:
        return self._room.counts() if self._room else (-1, -1, -1)

    def _each(self, keys: Keys, timeout_s: float) -> Iterator[int]:
        if self._closed:
            raise TierError(f"the tier of {self._root} is closed")
        return in_time(len(keys), timeout_s)

    def _read(self, key: bytes, index: int, buffer: memoryview, answers: Answers) -> None:
        """Fill a buffer and settle its answer; a file that is damaged is deleted, and none that replaced it."""
        try:
            file = _opened(self._root, key)
            try:
                answers.settle(index, _read_whole(file, buffer))
                if answers.claims_drop(index):
                    with contextlib.suppress(OSError):
                        self._unlink(key, os.fstat(file))  # open, so no other has its number
            finally:
                os.close(file)
        except (FileNotFoundError, InTheWay):
            answers.settle(index, Outcome.ABSENT)
        except OSError as error:
            answers.settle(index, self._failed(error))

    def _write(self, key: bytes, record: memoryview, stamp_ns: int, deadline: float) -> Outcome:
        try:
            try:
                return self._write_once(key, record, stamp_ns, deadline)
            except OSError as error:
                if isinstance(error, TimeoutError) or error.errno not in _GONE:
                    raise
            self._renew()
            return self._write_once(key, record, stamp_ns, deadline)
        except TimeoutError:
            raise
        except OSError as error:
            return self._failed(error)

    def _write_once(
        self, key: bytes, record: memoryview, stamp_ns: int, deadline: float
    ) -> Outcome:
        """Write a record, unless it is there. Raises `OSError`."""
        size, room = len(record), self._room
        before = size_of(self._root, key) if room is None else room.size_of(key)
        if before == size:
            return Outcome.PRESENT
        reserved = None if room is None else room.reserve(size, deadline)
        if room is not None and reserved is None:
            return Outcome.FULL
        name = f"{key.hex()}.{secrets.token_hex(8)}"

        def move() -> None:
            into = folder_of(self._root, key)
            with Descriptor(make_folder(into, self._directory.access)) as target:
                os.rename(name, name_of(key), src_dir_fd=folder, dst_dir_fd=target)

        try:
            with Descriptor(open_folder(self._unfinished)) as folder:
                self._write_whole(folder, name, record, stamp_ns)
                if room is None or reserved is None:
                    move()
                else:
                    room.place(move, key, reserved)
        except BaseException:
            if room is not None and reserved is not None:
                room.give_back(reserved)
            with contextlib.suppress(OSError):
                (self.path / "unfinished" / name).unlink()
            raise
        return Outcome.STORED

    def _write_whole(self, folder: int, name: str, record: memoryview, stamp_ns: int) -> None:
        with Descriptor(create_file(name, folder, self._directory.access)) as file:
            written = 0
            while written < len(record):
                written += os.write(file, record[written:])
            self._clock.set(os.fstat(file).st_mtime_ns)
            os.utime(file, ns=(stamp_ns, stamp_ns))

    def _failed(self, error: OSError) -> Outcome:
        """Return the outcome of an error, which is noted for people."""
        self.last_failure = str(error)
        return Outcome.FULL if error.errno in _NO_ROOM else Outcome.ERROR

    def _renew(self) -> None:
        """Make anew what others deleted of the directory. Raises `OSError` where it cannot be."""
        with self._renewing:
            is_new = self._directory.renew()
            os.close(make_folder(self._unfinished, self._directory.access))
            if is_new:
                self.last_failure = self._directory.say_renewed("it was emptied or replaced")
        if self._room is not None:
            self._room.recount()

    def _open(self) -> None:
        """Make the directory, see that it can be written, and delete what writers left that died."""
        if self.is_read_only:
            self._look()
            return
        try:
            self._directory.begin()
            now_ns = unfinished.begin(
                self._unfinished,
                self._directory.access,
                STALE_S if self._directory.was_marked else None,
            )
            self._clock.set(now_ns)
        except OSError as error:
            if error.errno in _READ_ONLY:
                _log.warning("%s is opened to read only, nothing is stored: %s", self._root, error)
                self.is_read_only = True
                self._look()
                return
            raise TierError(
                f"cannot keep files in {self._root}: {_reason(error)}; give a directory "
                "that this user may read and write"
            ) from error

    def _look(self) -> None:
        """See that the directory is there and can be read. Raises `TierError`."""
        try:
            self._directory.look()
            os.listdir(self._root)  # noqa: PTH208 - as the tier does
        except OSError as error:
            raise TierError(f"cannot list {self._root!r}: {error.strerror}") from error


def _reason(error: OSError) -> str:
    return str(error) if isinstance(error, InTheWay) else error.strerror or str(error)


def _opened(root: str, key: bytes) -> int:
    """Open the file of a record to read. Raises `InTheWay` and `OSError`."""
    folder = open_folder(folder_of(root, key))
    try:
        return open_file(name_of(key), os.O_RDONLY, folder)
    finally:
        os.close(folder)


def _read_whole(file: int, buffer: memoryview) -> Outcome:
    """Fill a buffer from a file of its size. Raises `OSError`."""
    if os.fstat(file).st_size != len(buffer):
        return _of_another_size(file)
    position = 0
    while position < len(buffer):
        count = os.preadv(file, [buffer[position:]], position)
        if not count:
            return Outcome.CORRUPT
        position += count
    return Outcome.HIT


def _of_another_size(file: int) -> Outcome:
    """Tell a good record of another size from one that was cut off."""
    try:
        read_header(os.pread(file, HEADER_BYTES, 0))
    except RecordError as error:
        return Outcome.FOREIGN if error.is_foreign else Outcome.CORRUPT
    return Outcome.FOREIGN
