"""Room of a directory of record files: a count of them, and the oldest go where they exceed the capacity."""

# A Path per record would cost more than the system call.

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakSet

from quire.tiers.directory import Descriptor, InTheWay, open_folder
from quire.tiers.format import KEY_BYTES
from quire.tiers.threads import Background

SUFFIX = ".quire"
WATERMARK = 0.05
"""Part of the capacity that is made room of in one go, or written before the next listing begins."""

_ENOUGH_SWEEPS = 3
"""A sweep may have listed too early, or all it chose may have been used before it came to delete."""

_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\{SUFFIX}")
_FOLDER = re.compile("[0-9a-f]{2}")


def folder_of(root: str, key: bytes) -> str:
    """Return the path of a record's folder: one of 256, by the first byte of its key."""
    return f"{root}/{key[:1].hex()}"


def name_of(key: bytes) -> str:
    """Return the name of a record's file."""
    return f"{key.hex()}{SUFFIX}"


def file_of(root: str, key: bytes) -> str:
    """Return the path of a record."""
    return f"{folder_of(root, key)}/{name_of(key)}"


def walk(root: str) -> Iterator[tuple[int, int, bytes]]:
    """Iterate over (modification time in ns, size, key) of all record files. Raises `OSError`.

    A folder or other entry with the name of a record is left out.
    """
    with os.scandir(root) as found:
        folders = sorted(entry.name for entry in found if _FOLDER.fullmatch(entry.name))
    for name in folders:
        listed: list[tuple[int, int, bytes]] = []
        with (
            contextlib.suppress(FileNotFoundError, InTheWay),
            Descriptor(open_folder(f"{root}/{name}")) as folder,
            os.scandir(folder) as found,
        ):
            for entry in found:
                match = _NAME.fullmatch(entry.name)
                if match and entry.name.startswith(name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            key = bytes.fromhex(match[1])
                            listed.append((status.st_mtime_ns, status.st_size, key))
        yield from listed


def status_of(root: str, key: bytes) -> os.stat_result | None:
    """Return the status of a record's file, None where it is gone. Raises `InTheWay` and `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        folder = open_folder(folder_of(root, key))
        try:
            status = os.stat(name_of(key), dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)
        if not stat.S_ISREG(status.st_mode):
            raise InTheWay(file_of(root, key))
        return status
    return None


def size_of(root: str, key: bytes) -> int | None:
    """Return the size of a record's file, None where it is gone. Raises `InTheWay` and `OSError`."""
    status = status_of(root, key)
    return None if status is None else status.st_size


def unlink(root: str, key: bytes, is_meant: Callable[[os.stat_result], bool]) -> int | None:
    """Delete a record's file, if it is one that is meant; return its size, None where none was. Raises `OSError`."""
    with (
        contextlib.suppress(FileNotFoundError, InTheWay),
        Descriptor(open_folder(folder_of(root, key))) as folder,
    ):
        status = os.stat(name_of(key), dir_fd=folder, follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and is_meant(status):
            os.unlink(name_of(key), dir_fd=folder)
            return status.st_size
    return None


class Reserved:
    """Room for a file that is being written.

    It ends when the file is placed, the room is given back, or no frame refers to this object.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class Spared:
    """Keys that make no room as long as a frame refers to this object."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.keys = frozenset(keys)


class FilesRoom:
    """Counts the files of a directory against a capacity, and deletes the oldest in time.

    What this process writes and deletes is counted as it happens; what others do is learned by
    a sweep, in a thread of its own: it lists the directory and deletes what is too much.

        held == bytes of files that this process knows + bytes of files that it is writing

    A file is as old as its modification time says. One from the future is as old as the listing before the one
    that found it: another's clock makes nothing new for ever, nor newer than what this process has written since.
    """

    def __init__(self, root: str, capacity: int, now_ns: Callable[[], int]) -> None:
        self.capacity = capacity
        self._root = root
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._sweeper = Background(self._sweep, "quire-files")
        self._meanwhile: dict[bytes, int] = {}
        """What was written since the last sweep began, by size, or deleted: -1."""
        self._from_future: dict[bytes, tuple[int, int]] = {}
        """Modification time of a file, and of the listing before the one that found it so."""
        self._listed_ns = now_ns()
        self._spared: WeakSet[Spared] = WeakSet()
        self._reserved: WeakSet[Reserved] = WeakSet()
        self._wanted = self._since_listed = self._known = 0
        self.records = 0
        for stamp_ns, key in self._settle(list(walk(root))):
            with contextlib.suppress(OSError):  # a put that finds no room says so
                self.remove(key, listed_ns=stamp_ns)

    @property
    def _held(self) -> int:
        """Bytes of the files there are, and of those that are being written. The lock is held."""
        return self._known + sum(each.num_bytes for each in list(self._reserved))

    def reserve(self, num_bytes: int, deadline: float) -> Reserved | None:
        """Take room for a file; None where there is none. Raises `TimeoutError`."""
        slack = self.capacity * WATERMARK
        for _ in range(_ENOUGH_SWEEPS + 1):
            if num_bytes > self.capacity:
                break
            with self._lock:
                if self._held + num_bytes <= self.capacity and self._since_listed <= 2 * slack:
                    reserved = Reserved(num_bytes)
                    self._reserved.add(reserved)
                    self._since_listed += num_bytes
                    if self._since_listed > slack:
                        self._sweeper.wake()
                    return reserved
                self._wanted = max(self._wanted, num_bytes)
            self._sweeper.wake()
            if not self._sweeper.settle(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError
        return None

    def give_back(self, reserved: Reserved) -> None:
        """Return room whose file was not written."""
        with self._lock:
            self._reserved.discard(reserved)

    def size_of(self, key: bytes) -> int | None:
        """Return the size of a file, None where it is gone: never one that is just being deleted. Raises `OSError`."""
        with self._lock:
            return size_of(self._root, key)

    def place(self, move: Callable[[], None], key: bytes, reserved: Reserved) -> None:
        """Have `move` rename a file whose room was reserved to its place, and count it. Raises `OSError`."""
        with self._lock:  # what it replaces may have been deleted since, to make this room
            before = size_of(self._root, key)
            move()
            self._reserved.discard(reserved)
            self._known += reserved.num_bytes - (before or 0)
            self.records += before is None
            self._meanwhile[key] = reserved.num_bytes

    def remove(
        self, key: bytes, only: os.stat_result | None = None, listed_ns: int | None = None
    ) -> None:
        """Delete a file, and count it; not one that was used at another time than `listed_ns`, or another than `only`.

        Raises `OSError`.
        """

        def is_meant(status: os.stat_result) -> bool:
            is_same = only is None or os.path.samestat(status, only)
            return is_same and listed_ns in (None, status.st_mtime_ns)

        with self._lock:
            size = unlink(self._root, key, is_meant)
            if size is not None:
                self._known -= size
                self.records -= 1
                self._meanwhile[key] = -1

    def sparing(self, keys: Sequence[bytes]) -> Spared:
        """Return what a call refers to while it writes a prompt: no file of it makes room for the rest."""
        spared = Spared(keys)
        with self._lock:
            self._spared.add(spared)
        return spared

    def counts(self) -> tuple[int, int, int]:
        """Return records, bytes held and capacity in bytes."""
        with self._lock:
            return self.records, self._held, self.capacity

    def recount(self) -> None:
        """List the directory soon: others changed it."""
        self._sweeper.wake()

    def close(self) -> None:
        """Sweep no more; return when no sweep is running."""
        self._sweeper.stop()

    def _sweep(self) -> bool:
        with self._lock:
            self._since_listed, self._meanwhile = 0, {}
        # What cannot be listed or deleted now is a put that finds no room.
        with contextlib.suppress(OSError):
            listed = list(walk(self._root))
            with self._lock:
                victims = self._settle(listed)
            for stamp_ns, key in victims:
                self.remove(key, listed_ns=stamp_ns)
        return False

    def _settle(self, listed: list[tuple[int, int, bytes]]) -> list[tuple[int, bytes]]:
        """Count what was listed; return time and key of the files to delete, the oldest."""
        settled = [each for each in listed if each[2] not in self._meanwhile]
        written = [size for size in self._meanwhile.values() if size >= 0]
        self.records = len(settled) + len(written)
        self._known = sum(size for _, size, _ in settled) + sum(written)
        ages = self._ages(settled)
        wanted, self._wanted = self._wanted, 0
        if self._held + wanted <= self.capacity:
            return []
        excess = self._held + max(wanted, int(self.capacity * WATERMARK)) - self.capacity
        spared = frozenset[bytes]().union(*(each.keys for each in list(self._spared)))
        victims: list[tuple[int, bytes]] = []
        for _, stamp_ns, size, key in sorted(ages):
            if excess <= 0:
                break
            if key not in spared:
                victims.append((stamp_ns, key))
                excess -= size
        return victims

    def _ages(self, settled: list[tuple[int, int, bytes]]) -> list[tuple[int, int, int, bytes]]:
        """Return of each file since when it counts as used, its modification time, size and key."""
        now_ns, last_ns = self._now_ns(), self._listed_ns
        self._listed_ns = now_ns
        before, self._from_future = self._from_future, {}
        ages: list[tuple[int, int, int, bytes]] = []
        for stamp_ns, size, key in settled:
            said_ns, since_ns = before.get(key, (-1, 0))
            if said_ns != stamp_ns:  # used since
                since_ns = stamp_ns if stamp_ns <= now_ns else last_ns
            if since_ns < stamp_ns:
                self._from_future[key] = (stamp_ns, since_ns)
            ages.append((since_ns, stamp_ns, size, key))
        return ages
