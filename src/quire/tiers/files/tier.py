"""A tier of one file per record, named by its key: for directories that many processes share."""

# A Path per record would cost more than the system call.
# ruff: noqa: PTH103, PTH105, PTH108, PTH110, PTH116, PTH120, PTH123

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator

from quire.config import parse_bytes
from quire.errors import RecordError, TierError
from quire.tiers.addresses import directory_of
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.files.room import (
    FilesRoom,
    entries,
    file_of,
    keys_in,
    move,
    size_of,
    sync_folder,
    walk,
)
from quire.tiers.format import HEADER_BYTES, KEY_BYTES, TENANT_AT, read_header
from quire.tiers.in_time import in_time
from quire.tiers.purging import ROUNDS, Purge

STALE_S = 3600.0
"""Unfinished files that are this old have lost their writer."""

_STEP_NS = 1000
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Files(Tier):
    """Files `path/ab/<key>.quire`, each holding one record, written elsewhere and renamed.

    Any number of processes and machines may share the directory: a file is there whole or not
    at all, and two that write the same key write the same content. A machine that loses power may leave a
    file with parts missing; its reader finds out and deletes it.

    With a `capacity` each process deletes the files used longest ago, 5 % in one go. It learns of the
    others' files by listing the directory each time it has written 5 % itself: one process never exceeds
    the capacity, each other one may add 10 % of it and a record. Uses are kept as modification times,
    the head of a prompt newest; without a capacity they are not written.

    A system call that hangs on a dead server cannot be interrupted; timeouts are looked at between records.

    `path`      a directory; it is made if it is not there. Raises `TierError` where it cannot be written
    `capacity`  "200GiB" or a number of bytes; None: as much as there is room for
    `clock`     seconds since the epoch, as those who share the directory count them
    """

    is_local = False
    marks_purges = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: str | int | None = None,
        *,
        clock: Callable[[], float] = time.time,
        name: str = "files",
    ) -> None:
        super().__init__()
        self.name = name
        num_bytes = None if capacity is None else parse_bytes(capacity)
        self.path = directory_of(path)
        self._root = os.fspath(self.path)
        self._unfinished = f"{self._root}/unfinished"
        self._clock = clock
        self._closed = False
        self._lock = threading.Lock()
        self._stamp_ns = 0
        self._open()
        self._room = None if num_bytes is None else FilesRoom(self._root, num_bytes)

    def touch(self, keys: Keys) -> None:
        if self._room is None or self._closed:
            return
        newest = self._stamps(len(keys))
        for index, key in enumerate(keys):
            stamp = newest - index * _STEP_NS
            with contextlib.suppress(OSError):
                os.utime(file_of(self._root, key), ns=(stamp, stamp))

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
        deadline = time.monotonic() + timeout_s
        newest = self._stamps(len(keys))
        floor = newest - len(keys) * _STEP_NS
        with self._room.sparing(floor) if self._room else contextlib.nullcontext():
            # What is there of this prompt already must not make room for the rest of it.
            self.touch(keys)
            for index in self._each(keys, timeout_s):
                stamp = newest - index * _STEP_NS
                done[index] = self._write(keys[index], records[index], stamp, deadline)
        if Outcome.PRESENT in done:
            self.touch(keys)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        found = [False] * len(keys)
        with contextlib.suppress(TimeoutError):
            for index in self._each(keys, timeout_s):
                found[index] = os.path.exists(file_of(self._root, keys[index]))
        return found

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        for index in self._each(keys, timeout_s):
            self._unlink(keys[index])

    def _purge(self, purge: Purge) -> None:
        """Delete the files of a tag, and those that are being written.

        They are not overwritten: a reader may have one open, and a file system may write elsewhere anyway.
        """
        folders: set[str] = set()
        for _ in range(ROUNDS):
            own = [(key, size) for key, size in keys_in(self._root) if purge.owns(key)]
            for key, size in own:
                self._unlink(key)
                folders.add(os.path.dirname(file_of(self._root, key)))
                purge.count += 1
                purge.num_bytes += size
                assert purge.left_s
            if not own:
                break
        else:
            purge.reasons.append("others keep writing records of the tenant")
        for entry in entries(self._unfinished):
            if entry.name[TENANT_AT * 2 : KEY_BYTES * 2] == purge.tag.hex():
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
        for folder in (*folders, self._unfinished):
            sync_folder(folder)

    def _read_mark(self, name: str, timeout_s: float) -> bytes:
        try:
            with open(f"{self._unfinished}/purged.{name}", "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def _set_mark(self, name: str, timeout_s: float) -> None:
        """Write a mark where `STALE_S` later it is deleted: no write takes so long."""
        fresh = f"{self._unfinished}/{secrets.token_hex(8)}"
        with open(fresh, "xb") as file:
            file.write(secrets.token_bytes(16))
        os.replace(fresh, f"{self._unfinished}/purged.{name}")

    def _unlink(self, key: bytes, only: os.stat_result | None = None) -> None:
        """Delete a file, unless it is gone or another than `only`. Raises `OSError`."""
        if self._room is not None:
            self._room.remove(key, only=only)
            return
        file = file_of(self._root, key)
        with contextlib.suppress(FileNotFoundError):
            if only is None or os.path.samestat(os.stat(file), only):
                os.unlink(file)

    def _size(self) -> tuple[int, int, int]:
        room = self._room
        return (room.records, room.held, room.capacity) if room else (-1, -1, -1)

    def _each(self, keys: Keys, timeout_s: float) -> Iterator[int]:
        if self._closed:
            raise TierError(f"the tier of {self._root} is closed")
        return in_time(len(keys), timeout_s)

    def _read(self, key: bytes, index: int, buffer: memoryview, answers: Answers) -> None:
        """Fill a buffer and settle its answer; a file that is damaged is deleted, and none that replaced it."""
        try:
            file = os.open(file_of(self._root, key), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            answers.settle(index, Outcome.ABSENT)
            return
        except OSError:
            answers.settle(index, Outcome.ERROR)
            return
        try:
            answers.settle(index, _read_whole(file, buffer))
            if answers.claims_drop(index):
                with contextlib.suppress(OSError):
                    self._unlink(key, os.fstat(file))  # open, so no other has its number
        finally:
            os.close(file)

    def _write(self, key: bytes, record: memoryview, stamp_ns: int, deadline: float) -> Outcome:
        file, size, room = file_of(self._root, key), len(record), self._room
        try:
            before = size_of(file) if room is None else room.size_of(key)
        except OSError:
            return Outcome.ERROR
        if before == size:
            return Outcome.PRESENT
        if room is not None and not room.reserve(size, deadline):
            return Outcome.FULL
        unfinished = f"{self._unfinished}/{key.hex()}.{secrets.token_hex(8)}"
        try:
            _write_whole(unfinished, record, stamp_ns)
            if room is None:
                move(unfinished, file)
            else:
                room.place(unfinished, key, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            if room is not None:
                room.give_back(size)
            return Outcome.FULL if error.errno in _NO_ROOM else Outcome.ERROR
        return Outcome.STORED

    def _stamps(self, count: int) -> int:
        """Return the newest of so many time stamps, all above any before, whatever the clock says."""
        with self._lock:
            after = self._stamp_ns + (count + 1) * _STEP_NS
            self._stamp_ns = max(int(self._clock() * 1e9), after)
            return self._stamp_ns

    def _open(self) -> None:
        """Make the directory, see that it can be written, and delete what writers left that died."""
        probe = f"{self._unfinished}/{secrets.token_hex(8)}"
        try:
            os.makedirs(self._unfinished, exist_ok=True)
            with open(probe, "xb"):
                now = os.stat(probe).st_mtime
            os.unlink(probe)
            for entry in entries(self._unfinished):
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < now - STALE_S:
                        os.unlink(entry.path)
        except OSError as error:
            raise TierError(
                f"cannot keep files in {self._root}: {error.strerror or error}; give a directory "
                "that this user may read and write"
            ) from error


def _read_whole(file: int, buffer: memoryview) -> Outcome:
    """Fill a buffer from a file of its size."""
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return Outcome.CORRUPT
        if status.st_size != len(buffer):
            return _of_another_size(file)
        position = 0
        while position < len(buffer):
            count = os.preadv(file, [buffer[position:]], position)
            if not count:
                return Outcome.CORRUPT
            position += count
    except OSError:
        return Outcome.ERROR
    return Outcome.HIT


def _of_another_size(file: int) -> Outcome:
    """Tell a good record of another size from one that was cut off."""
    try:
        read_header(os.pread(file, HEADER_BYTES, 0))
    except RecordError as error:
        return Outcome.FOREIGN if error.is_foreign else Outcome.CORRUPT
    return Outcome.FOREIGN


def _write_whole(path: str, record: memoryview, stamp_ns: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        written = 0
        while written < len(record):
            written += os.write(file, record[written:])
        os.utime(file, ns=(stamp_ns, stamp_ns))
    finally:
        os.close(file)
