"""The file of a slab's index, byte by byte: which record lies in which place.

`index-<bytes>.quire` is a sequence of rows of 64 bytes; all numbers are little-endian. The first is its head:

    offset  bytes  field
         0      8  checksum
         8      8  magic      b"quire-ix"
        16      2  major      1; a reader refuses any other
        18      2  minor      0
        20     44  reserved   0

Row i + 1 is the entry of place i of the slab, all zeros where nothing lies there:

         0      8  checksum
         8      8  stamp      when the record was used last, by a counter
        16      8  tag        the record's own header checksum, which covers key, generation and payload checksum
        24      4  place      i
        28      4  size       of the slab's records, in units of 64 bytes
        32     32  key

Checksum: of the other seven words w[k] of the row, the sum of (w[k] ^ w[k] >> 32) * f[k] modulo 2^64, f[k] the odd
numbers below; so every change of one word is seen, and a million rows are checked by a few calls of NumPy.

A row is written in place and lies in one sector, so it is whole or the one before. One that does not hold costs nothing as
long as its record does: the header in front of the record has key and tag as well (`opening.py`). Of a deleted record that
header still stands, so a row with `STRAY_BITS` set bits at most is all zeros that were damaged: nothing lies in its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from struct import Struct
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import TierError
from quire.tiers.disk.files import DiskFiles
from quire.tiers.format import KEY_BYTES
from quire.tiers.places.columns import Places, as_words, byte_view

ROW_BYTES = 64
SIZE_UNIT = 64
MAX_SIZE = (2**32 - 1) * SIZE_UNIT
"""Bytes of the largest record that an entry can name."""

KEY_AT = 32

ENTRY = np.dtype(
    [
        ("checksum", "<u8"),
        ("stamp", "<i8"),
        ("tag", "<u8"),
        ("place", "<u4"),
        ("size", "<u4"),
        ("key", "u1", KEY_BYTES),
    ]
)
"""An entry as NumPy sees it."""

_ROW = np.dtype(f"V{ROW_BYTES}")

_WORD = np.dtype("<u8")
_HALF = np.uint64(32)

_MAGIC, _MAJOR, _MINOR = b"quire-ix", 1, 0
_HEAD = Struct("<Q8sHH44x")
_ENTRY = Struct("<QqQII32s")
_ROWS_AT_ONCE = 1 << 14

STRAY_BITS = 8
"""An entry has some 64 set bits in its checksum and its tag alone; fewer than these 9 in one of 10^27."""

_FACTORS = np.array(
    [
        0x6A09E667F3BCC909,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
    ],
    np.uint64,
)
"""The fractions of the square roots of the first primes, as SHA-512 begins with, made odd."""


class IndexContents(msgspec.Struct, frozen=True):
    """The contents of an index file.

    `entries`     valid entries that name a record, an array of `ENTRY` by place
    `damaged`     places whose entry is invalid
    `num_entries` entries of the file; it says nothing of places from there on
    """

    entries: NDArray[Any]
    damaged: list[int]
    num_entries: int


class IndexFile:
    """The file of a slab's index. Its owner locks."""

    def __init__(self, files: DiskFiles, path: Path, record_bytes: int, flags: int) -> None:
        self.path = path
        self._files = files
        self._size = record_bytes // SIZE_UNIT
        self._has_head = False
        self.descriptor = -1
        """Number of the open file; -1 where there is none."""
        with suppress(FileNotFoundError):  # who only reads does without
            self.descriptor = files.open(path, flags)

    def read(self) -> IndexContents:
        """Read all of it. Raises `TierError` where a later version wrote it."""
        length = os.fstat(self.descriptor).st_size if self.descriptor >= 0 else 0
        rows = length // ROW_BYTES
        written = [
            range(start // ROW_BYTES, end // ROW_BYTES)
            for start, end in self._files.data_ranges(self.descriptor, rows * ROW_BYTES)
        ]
        entries = np.zeros(sum(map(len, written)), ENTRY)
        damaged: list[int] = []
        at = 0
        for each in written:
            for row in each[::_ROWS_AT_ONCE]:
                some = entries[at : at + min(_ROWS_AT_ONCE, each.stop - row)]
                holds = self._read_rows(some, row)
                damaged += (row - 1 + np.flatnonzero(~holds)).tolist()
                is_used = holds & (some["stamp"] > 0)
                count = np.count_nonzero(is_used)
                if at or count < len(some):
                    kept = some.view(_ROW)[is_used]  # by fields it takes ten times as long
                    entries[at : at + count].view(_ROW)[:] = kept
                at += count
        return IndexContents(entries[:at], damaged, max(rows - 1, 0))

    def reserve(self, num_places: int) -> None:
        """Get disk space for the entries of so many places: none of them is ever short of it. Raises `OSError`."""
        length = (num_places + 1) * ROW_BYTES
        before = os.fstat(self.descriptor).st_size
        if before < length:
            self._files.allocate(self.descriptor, before, length - before)
        if not self._has_head:
            head = bytearray(_HEAD.pack(0, _MAGIC, _MAJOR, _MINOR))
            head[:8] = checksums(np.frombuffer(head, ENTRY)).tobytes()
            self._files.write_at(self.descriptor, memoryview(head), 0)
            self._has_head = True

    def cut(self, num_places: int) -> None:
        """Drop the entries of places from there on. Raises `OSError`."""
        self._files.truncate(self.descriptor, (num_places + 1) * ROW_BYTES)

    def write(self, entries: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Write the entries of some places: place, tag, stamp and key. Raises `OSError`, maybe in the middle."""
        data = bytearray(len(entries) * ROW_BYTES)
        for at, (place, tag, stamp, key) in enumerate(entries):
            _ENTRY.pack_into(data, at * ROW_BYTES, 0, stamp, tag, place, self._size, key)
        self._seal_and_write([entry[0] for entry in entries], data)

    def write_many(
        self,
        places: Places,
        tags: NDArray[np.uint64],
        stamps: NDArray[np.int64],
        keys: NDArray[np.uint8],
    ) -> None:
        """Write the entries of many places, keys [n, 32]; empty where the stamp is 0. Raises `OSError`."""
        data = bytearray(len(places) * ROW_BYTES)
        words = np.frombuffer(data, _WORD).reshape(-1, ROW_BYTES // 8)
        words[:, 1], words[:, 2], words[:, 3] = stamps, tags, places | self._size << 32
        words[:, 4:] = as_words(keys)
        words[stamps == 0] = 0
        self._seal_and_write(places.tolist(), data)

    def clear(self, places: Sequence[int]) -> None:
        """Say that nothing lies in places. Raises `OSError`, maybe in the middle."""
        self._write_rows(sorted(places), bytes(len(places) * ROW_BYTES))

    def sync(self) -> None:
        """Return when earlier writes would survive a loss of power."""
        self._files.sync(self.descriptor)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _seal_and_write(self, places: list[int], rows: bytearray) -> None:
        words = np.frombuffer(rows, _WORD).reshape(-1, ROW_BYTES // 8)
        words[:, 0] = _sums(words)
        self._write_rows(places, rows)

    def _write_rows(self, places: Sequence[int], rows: bytes | bytearray) -> None:
        """Write rows, neighbours by one call of the system."""
        view = memoryview(rows)
        cuts = [at for at, (last, place) in enumerate(pairwise(places), 1) if place != last + 1]
        for start, stop in pairwise([0, *cuts, len(places)] if places else ()):
            some = view[start * ROW_BYTES : stop * ROW_BYTES]
            self._files.write_at(self.descriptor, some, (places[start] + 1) * ROW_BYTES)

    def _read_rows(self, rows: NDArray[Any], first: int) -> NDArray[np.bool_]:
        """Read rows; return which of them hold. The head's does, and says that nothing is in its place."""
        view = byte_view(rows)
        self._files.read_at(self.descriptor, view, first * ROW_BYTES)
        holds = checksums(rows) == rows["checksum"]
        if not first:
            self._check_version(view, is_whole=bool(holds[0]))
            rows["stamp"][0], holds[0] = 0, True
        for at in np.flatnonzero(~holds):
            if int.from_bytes(rows[at].tobytes()).bit_count() <= STRAY_BITS:
                rows[at], holds[at] = 0, True
        is_own = (rows["place"] == np.arange(first - 1, first - 1 + len(rows))) & (
            rows["size"] == self._size
        )
        return holds & (is_own | (rows["stamp"] == 0))

    def _check_version(self, view: memoryview[int], *, is_whole: bool) -> None:
        """Look at the head; a damaged one is written anew when places are reserved."""
        _, magic, major, _ = _HEAD.unpack_from(view)
        self._has_head = is_whole and magic == _MAGIC
        if self._has_head and major != _MAJOR:
            raise TierError(
                f"{self.path}: version {major} of the index format; this reader knows {_MAJOR}; "
                "use another directory, or the quire that wrote this one"
            )


def checksums(entries: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the checksum of each entry, as the module says."""
    return _sums(entries.view(_WORD).reshape(-1, ROW_BYTES // 8))


def _sums(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    folded = words[:, 1:] >> _HALF
    folded ^= words[:, 1:]
    folded *= _FACTORS
    return folded.sum(axis=1)
