"""The disk tier's logs in its directory: read, appended to, and written anew when they grow."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import RecordError, TierError
from quire.tiers.disk.files import DiskFiles
from quire.tiers.disk.lines import (
    KEY_AT,
    LINE,
    LINE_BYTES,
    SIZE_UNIT,
    Line,
    LogHead,
    decode_head,
    encode_frame,
    encode_head,
    encode_lines,
    mark_lines,
)
from quire.tiers.places.key_table import Places, byte_view, later_duplicates

_NAME = re.compile(r"log-(\d{8,})\.quire")
_ATTEMPTS = 20


class LogContents(msgspec.Struct, frozen=True):
    """The lines of the logs of a directory.

    `lines`       an array of `LINE` in order; those of size 0 do not count
    `numbers`     of the logs that they come from
    `next_number` above that of every log there
    `lost_lines`  lines that do not hold
    `lost_logs`   files whose head does not hold
    """

    lines: NDArray[Any]
    numbers: tuple[int, ...]
    next_number: int
    lost_lines: int
    lost_logs: int

    @property
    def num_lines(self) -> int:
        """Lines that count."""
        return int(np.count_nonzero(self.lines["size"]))


def log_path(directory: Path, number: int) -> Path:
    """Return the path of the log of a number."""
    return directory / f"log-{number:08d}.quire"


def read_logs(directory: Path) -> LogContents:
    """Read the logs of a directory, which another process may be writing to.

    Raises `TierError` where one is of a later version or cannot be read.
    """
    if not directory.is_dir():
        raise TierError(f"{directory} cannot be read as a disk tier: it is no directory")
    for _ in range(_ATTEMPTS):
        # A log that is gone by now was replaced by a whole one: then look again.
        with contextlib.suppress(FileNotFoundError):
            return _read_logs(directory)
    raise TierError(f"the logs of {directory} change faster than they are read; try again")


def _read_logs(directory: Path) -> LogContents:
    numbers = sorted(
        int(match[1]) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))
    )
    used: list[tuple[LogHead, FileIO]] = []
    lost_logs = 0
    with ExitStack() as opened:
        for number in reversed(numbers):
            path = log_path(directory, number)
            file = opened.enter_context(path.open("rb", buffering=0))
            start = file.read(LINE_BYTES)
            try:
                head = decode_head(start)
            except RecordError as error:
                if error.is_foreign:
                    raise TierError(
                        f"{path}: {error}; use another directory, or the quire that wrote this one"
                    ) from error
                lost_logs += bool(start)  # an empty one was begun and never used
                continue
            used.append((head, file))
            if head.is_whole:
                break
        lines, lost_lines = _all_lines(used[::-1])
    return LogContents(
        lines,
        tuple(head.number for head, _ in used[::-1]),
        max(numbers, default=0) + 1,
        lost_lines,
        lost_logs,
    )


def _all_lines(logs: Sequence[tuple[LogHead, FileIO]]) -> tuple[NDArray[Any], int]:
    """Read logs behind their heads into one array; return how many lines do not hold, too."""
    lengths = [os.fstat(file.fileno()).st_size - LINE_BYTES for _, file in logs]
    lines = np.zeros(sum(length // LINE_BYTES for length in lengths), LINE)
    at = 0
    lost = sum(length % LINE_BYTES > 0 for length in lengths)
    for (head, file), length in zip(logs, lengths, strict=True):
        own = lines[at : at + length // LINE_BYTES]
        at += len(own)
        view = byte_view(own)
        while len(view) and (count := file.readinto(view)):
            view = view[count:]
        lost += mark_lines(own, head.number)
    return lines, lost


def records_in(lines: NDArray[Any], num_places: Mapping[int, int]) -> tuple[dict[int, Places], int]:
    """Return the lines that name records, by record size, and the number of those that do so in vain.

    Indices of lines, int64. `num_places` holds the places that each slab really has: what lies
    beyond is in vain, and of places with one key all but the last that was written.
    """
    left: list[Places] = []
    is_inside = lines["size"] == 0
    for record_bytes, count in num_places.items():
        is_about = (lines["size"] == record_bytes // SIZE_UNIT) & (lines["place"] < count)
        is_inside |= is_about
        about = np.flatnonzero(is_about)
        last = np.full(count, -1, np.int64)
        last[lines["place"][about]] = about  # of equal indices, the last is kept
        last = last[last >= 0]
        left.append(last[lines["stamp"][last] > 0])
    rows = np.sort(np.concatenate(left)) if left else np.zeros(0, np.int64)
    outside = lines[~is_inside][::-1]
    codes = (outside["size"].astype(np.uint64) << np.uint64(32)) | outside["place"]
    _, last = np.unique(codes, return_index=True)
    in_vain = int(np.count_nonzero(outside["stamp"][last] > 0))
    newest_first = rows[::-1]
    words = lines.view(np.uint64).reshape(-1, LINE_BYTES // 8)[newest_first, KEY_AT // 8 :]
    repeated = later_duplicates(words)
    rows = np.delete(newest_first, repeated)
    sizes = lines["size"][rows]
    return (
        {each: rows[sizes == each // SIZE_UNIT] for each in num_places},
        in_vain + len(repeated),
    )


class DiskLog:
    """The log that is written to. Not thread-safe, but `write_whole` may run beside `append`."""

    def __init__(self, files: DiskFiles, directory: Path, number: int) -> None:
        self._files = files
        self._directory = directory
        self._descriptor = self._length = -1
        self._start(number)

    @property
    def number(self) -> int:
        """Of the log that lines are appended to."""
        return self._number

    def append(self, lines: Sequence[Line]) -> None:
        """Write lines behind the others. Raises `OSError`, and then none of them is there."""
        if self._length < 0:  # an earlier failure left no clean end
            self._start(self._number + 1)
        data = encode_lines(lines, self._number)
        try:
            self._files.write_at(self._descriptor, memoryview(data), self._length)
        except OSError:
            self._cut()
            raise
        self._length += len(data)

    def begin_whole(self) -> int:
        """Go on in a new log; return a number for a whole one that says all before it."""
        whole = self._number + 1
        self._start(whole + 1)
        return whole

    def write_whole(self, number: int, chunks: Iterable[NDArray[Any]]) -> None:
        """Write all records as a log of their own, and drop the logs before it. Raises `OSError`."""
        path = log_path(self._directory, number)
        draft = path.with_suffix(".draft")
        descriptor = self._files.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            at = 0
            head = encode_head(LogHead(number, is_whole=True))
            for data in chain([head], (encode_frame(lines, number) for lines in chunks)):
                self._files.write_at(descriptor, memoryview(data), at)
                at += len(data)
            # The logs before it go, so it must be there even after a loss of power.
            self._files.sync(descriptor)
        finally:
            self._files.close(descriptor)
        self._files.rename(draft, path)
        remove_logs(self._files, self._directory, number)

    def sync(self) -> None:
        """Return when what was appended would survive a loss of power."""
        self._files.sync(self._descriptor)

    def close(self) -> None:
        """Close the file; one without lines goes."""
        if self._descriptor < 0:
            return
        self._files.close(self._descriptor)
        self._descriptor = -1
        if self._length == LINE_BYTES:
            self._files.unlink(log_path(self._directory, self._number))

    def _start(self, number: int) -> None:
        """Begin a log. On failure the one before it stays in use."""
        path = log_path(self._directory, number)
        descriptor = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            head = encode_head(LogHead(number, is_whole=False))
            self._files.write_at(descriptor, memoryview(head), 0)
        except OSError:
            self._files.close(descriptor)
            raise
        self.close()
        self._descriptor, self._number, self._length = descriptor, number, LINE_BYTES

    def _cut(self) -> None:
        """Drop what a failed write left behind the last whole line."""
        try:
            self._files.truncate(self._descriptor, self._length)
        except OSError:
            self._length = -1


def remove_logs(files: DiskFiles, directory: Path, before: int) -> None:
    """Remove the logs of lower numbers and all drafts."""
    for path in sorted(directory.glob("log-*")):
        match = _NAME.fullmatch(path.name)
        if path.suffix == ".draft" or (match and int(match[1]) < before):
            files.unlink(path)
