"""The disk tier's log, byte by byte: which record lies in which place.

A log file is a sequence of lines of 64 bytes; all numbers are little-endian. The first is its head:

    offset  bytes  field
         0      8  magic      b"quire-lg"
         8      2  major      1; a reader refuses any other
        10      2  minor      0
        12      4  kind       1: whole, says all that earlier logs said; 0: goes on from them
        16      8  number     logs are read in order of their numbers
        24     32  reserved   0
        56      8  checksum   xxh3-64 of bytes 0 to 55

Every other line is about one place:

         0      8  checksum   xxh3-64 of bytes 8 to 63, with the log's number as its seed; 0 in a frame
         8      8  stamp      when the record was used last, by a counter; 0: the place holds nothing
        16      8  tag        the record's own header checksum, which covers key, generation and payload checksum
        24      4  place      index of the place in its slab
        28      4  size       of the slab's records, in units of 64 bytes; 0: the head of a frame
        32     32  key

or the head of a frame, whose lines have one checksum together: `tag` is the xxh3-64 of the lines, `place` their count.

The last line about a place counts, and of places with one key the last line. Lines that do not hold are left out:
a line that is lost costs a record, or names a place that now holds another record, which the tag tells when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from quire.errors import RecordError
from quire.tiers.format import KEY_BYTES
from quire.tiers.places.key_table import byte_view

LINE_BYTES = 64
FRAME_LINES = 4096
SIZE_UNIT = 64
KEY_AT = 32

LINE = np.dtype(
    [
        ("checksum", "<u8"),
        ("stamp", "<i8"),
        ("tag", "<u8"),
        ("place", "<u4"),
        ("size", "<u4"),
        ("key", "u1", KEY_BYTES),
    ]
)
"""A line as NumPy sees it."""

_MAGIC, _MAJOR, _MINOR = b"quire-lg", 1, 0
_HEAD = Struct("<8sHHIQ32s")
_BODY = Struct("<qQII32s")
_U64 = Struct("<Q")


class LogHead(msgspec.Struct, frozen=True):
    """The first line of a log. `is_whole`: it says all that logs of lower numbers said."""

    number: int
    is_whole: bool


class Line(msgspec.Struct, frozen=True):
    """The content of a place from here on; with stamp 0: nothing."""

    record_bytes: int
    place: int
    stamp: int = 0
    tag: int = 0
    key: bytes = bytes(KEY_BYTES)


def encode_head(head: LogHead) -> bytes:
    """Return a log's first line."""
    line = _HEAD.pack(_MAGIC, _MAJOR, _MINOR, int(head.is_whole), head.number, bytes(32))
    return line + _U64.pack(xxhash.xxh3_64_intdigest(line))


def decode_head(line: bytes) -> LogHead:
    """Return the head in a log's first line. Raises `RecordError`, `is_foreign` for another version."""
    if len(line) < LINE_BYTES:
        raise RecordError(f"{len(line)} bytes; a log's head takes {LINE_BYTES}")
    magic, major, _, kind, number, _ = _HEAD.unpack_from(line)
    if magic != _MAGIC:
        raise RecordError(f"begins with {magic!r}, not with {_MAGIC!r}: no log")
    if _U64.unpack_from(line, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(line[: _HEAD.size]):
        raise RecordError("the checksum of the log's head does not hold")
    if major != _MAJOR:
        raise RecordError(
            f"version {major} of the log format; this reader knows {_MAJOR}", is_foreign=True
        )
    return LogHead(number, kind == 1)


def encode_lines(lines: Sequence[Line], number: int) -> bytes:
    """Return lines for the log of that number, each with its checksum."""
    parts: list[bytes] = []
    for line in lines:
        body = _BODY.pack(
            line.stamp, line.tag, line.place, line.record_bytes // SIZE_UNIT, line.key
        )
        parts += _U64.pack(xxhash.xxh3_64_intdigest(body, number)), body
    return b"".join(parts)


def encode_frame(lines: NDArray[Any], number: int) -> bytes:
    """Return up to `FRAME_LINES` lines, an array of `LINE`, under one checksum."""
    data = lines.tobytes()
    body = _BODY.pack(0, xxhash.xxh3_64_intdigest(data), len(lines), 0, bytes(KEY_BYTES))
    return _U64.pack(xxhash.xxh3_64_intdigest(body, number)) + body + data


def mark_lines(lines: NDArray[Any], number: int) -> int:
    """Set the size of all that is no line about a place, or does not hold, to 0; return how many do not.

    `lines` is an array of `LINE`: what follows the head in the log of that number.
    """
    view = byte_view(lines)
    holds = np.zeros(len(lines), np.bool_)
    digest, at, lost = xxhash.xxh3_64_intdigest, 0, 0
    while at < len(lines):
        start = at * LINE_BYTES
        at += 1
        if digest(view[start + 8 : start + LINE_BYTES], number) != _U64.unpack_from(view, start)[0]:
            lost += 1
            continue
        _, tag, place, size, _ = _BODY.unpack_from(view, start + 8)
        if size:
            holds[at - 1] = True
            continue
        end = at + place
        if end <= len(lines) and digest(view[at * LINE_BYTES : end * LINE_BYTES]) == tag:
            holds[at:end] = True
        else:
            lost += min(place, len(lines) - at)
        at = end
    lines["size"][~holds] = 0
    return lost
