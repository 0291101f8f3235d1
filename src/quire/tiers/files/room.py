"""Room of a directory of record files: a count of them, and the oldest go where they exceed the capacity."""

# A Path per record would cost more than the system call.
# ruff: noqa: PTH103, PTH104, PTH108, PTH116, PTH120

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
from collections.abc import Generator, Iterator

from quire.tiers.background import Background
from quire.tiers.format import KEY_BYTES

SUFFIX = ".quire"
WATERMARK = 0.05
"""Part of the capacity that is made room of in one go, or written before the next listing begins."""

_ENOUGH_SWEEPS = 3
"""A sweep may have listed too early, or all it chose may have been used before it came to delete."""

_NAME = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\{SUFFIX}")


def file_of(root: str, key: bytes) -> str:
    """Return the path of a record: one of 256 folders, by the first byte of its key."""
    name = key.hex()
    return f"{root}/{name[:2]}/{name}{SUFFIX}"


def walk(root: str) -> Iterator[tuple[int, int, bytes]]:
    """List modification time in ns, size and key of each record file. Raises `OSError`."""
    for folder in entries(root):
        if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
            for entry in entries(folder.path):
                if match := _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_size, bytes.fromhex(match[1])


def keys_in(root: str) -> Iterator[tuple[bytes, int]]:
    """List key and size of each record file. Raises `OSError`."""
    return ((key, size) for _, size, key in walk(root))


def sync_folder(folder: str) -> None:
    """Return when what was deleted in a folder stays so after a loss of power. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def entries(folder: str) -> list[os.DirEntry[str]]:
    """List a folder; one that is gone has nothing in it."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []


def size_of(file: str) -> int | None:
    """Return the size of a file, None where it is gone. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(file).st_size
    return None


def move(unfinished: str, file: str) -> None:
    """Rename a file to its place, in a folder that is made if it is not there. Raises `OSError`."""
    try:
        os.rename(unfinished, file)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(file), exist_ok=True)
        os.rename(unfinished, file)


class FilesRoom:
    """Counts the files of a directory against a capacity, and deletes the oldest in time.

    What this process writes and deletes is counted as it happens; what others do is learned by
    a sweep, in a thread of its own: it lists the directory and deletes what is too much.

        held == bytes of files that this process knows + bytes of files that it is writing
    """

    def __init__(self, root: str, capacity: int) -> None:
        self.capacity = capacity
        self._root = root
        self._lock = threading.Lock()
        self._sweeper = Background(self._sweep, "quire-files")
        self._meanwhile: dict[bytes, int] = {}
        """What was written since the last sweep began, by size, or deleted: -1."""
        self._floors: list[int] = []
        self._wanted = self._since_listed = self._in_flight = 0
        self.records = self.held = 0
        for stamp_ns, key in self._settle(sorted(walk(root))):
            with contextlib.suppress(OSError):  # a put that finds no room says so
                self.remove(key, stamp_ns)

    def reserve(self, num_bytes: int, deadline: float) -> bool:
        """Take room for a file; return whether there is any. Raises `TimeoutError`."""
        slack = self.capacity * WATERMARK
        for _ in range(_ENOUGH_SWEEPS + 1):
            if num_bytes > self.capacity:
                break
            with self._lock:
                if self.held + num_bytes <= self.capacity and self._since_listed <= 2 * slack:
                    self.held += num_bytes
                    self._in_flight += num_bytes
                    self._since_listed += num_bytes
                    if self._since_listed > slack:
                        self._sweeper.wake()
                    return True
                self._wanted = max(self._wanted, num_bytes)
            self._sweeper.wake()
            if not self._sweeper.settle(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError
        return False

    def give_back(self, num_bytes: int) -> None:
        """Return room whose file was not written."""
        with self._lock:
            self.held -= num_bytes
            self._in_flight -= num_bytes

    def size_of(self, key: bytes) -> int | None:
        """Return the size of a file, None where it is gone: never one that is just being deleted. Raises `OSError`."""
        with self._lock:
            return size_of(file_of(self._root, key))

    def place(self, unfinished: str, key: bytes, num_bytes: int) -> None:
        """Rename a file whose room was reserved to its place, and count it. Raises `OSError`."""
        file = file_of(self._root, key)
        with self._lock:  # what it replaces may have been deleted since, to make this room
            before = size_of(file)
            move(unfinished, file)
            self._in_flight -= num_bytes
            self.held -= before or 0
            self.records += before is None
            self._meanwhile[key] = num_bytes

    def remove(
        self, key: bytes, used_until_ns: float = math.inf, only: os.stat_result | None = None
    ) -> None:
        """Delete a file, unless it is gone, was used later than that or is another than `only`, and count it. Raises `OSError`."""
        file = file_of(self._root, key)
        with self._lock, contextlib.suppress(FileNotFoundError):
            status = os.stat(file)
            is_meant = only is None or os.path.samestat(status, only)
            if is_meant and status.st_mtime_ns <= used_until_ns:
                os.unlink(file)
                self.held -= status.st_size
                self.records -= 1
                self._meanwhile[key] = -1

    @contextlib.contextmanager
    def sparing(self, floor_ns: int) -> Generator[None]:
        """While entered, delete no file used at that time or later: a call that still writes."""
        self._floors.append(floor_ns)
        try:
            yield
        finally:
            self._floors.remove(floor_ns)

    def close(self) -> None:
        """Sweep no more; return when no sweep is running."""
        self._sweeper.stop()

    def _sweep(self) -> bool:
        with self._lock:
            self._since_listed, self._meanwhile = 0, {}
        # What cannot be listed or deleted now is a put that finds no room.
        with contextlib.suppress(OSError):
            listed = sorted(walk(self._root))
            with self._lock:
                victims = self._settle(listed)
            for stamp_ns, key in victims:
                self.remove(key, stamp_ns)
        return False

    def _settle(self, listed: list[tuple[int, int, bytes]]) -> list[tuple[int, bytes]]:
        """Count what was listed; return time and key of the files to delete, the oldest."""
        settled = [each for each in listed if each[2] not in self._meanwhile]
        written = [size for size in self._meanwhile.values() if size >= 0]
        self.records = len(settled) + len(written)
        self.held = sum(size for _, size, _ in settled) + sum(written) + self._in_flight
        wanted, self._wanted = self._wanted, 0
        if self.held + wanted <= self.capacity:
            return []
        excess = self.held + max(wanted, int(self.capacity * WATERMARK)) - self.capacity
        floor_ns = min(self._floors, default=None)
        victims: list[tuple[int, bytes]] = []
        for stamp_ns, size, key in settled:
            if excess <= 0 or (floor_ns is not None and stamp_ns >= floor_ns):
                break
            victims.append((stamp_ns, key))
            excess -= size
        return victims
