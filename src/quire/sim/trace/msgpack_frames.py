"""Messages of msgpack that stand one after another in a file, told apart without decoding."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from quire.errors import TraceError
from quire.sim.trace.chunks import LINE_LIMIT, open_text, read_some

_FEW = 16
"""Arrays of fewer items are walked item by item."""

_MANY = 1 << 16
"""So are larger ones: they would be too long a pattern."""

_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1,
          0xD1: 2, 0xD2: 4, 0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}  # fmt: skip
"""Bytes after the tag, by tag."""

_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
          0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}  # fmt: skip
"""Bytes of the length, and bytes beside it, by tag."""

_ITEMS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count, and values per item, by tag."""


class _Incomplete(Exception):  # noqa: N818 - no error: more is to be read
    pass


def messages(path: Path) -> Iterator[bytes]:
    """Yield the messages of a file. Raises `TraceError`, with the number of the message."""
    rest, number = b"", 1
    with open_text(path) as stream:
        while piece := read_some(stream, path):
            rest += piece
            at = 0
            while at < len(rest):
                try:
                    end = _end(rest, at)
                except _Incomplete:
                    break
                except ValueError as error:
                    raise TraceError(f"{path}, batch {number:,}: not msgpack: {error}") from None
                yield rest[at:end]
                at, number = end, number + 1
            rest = rest[at:]
            if len(rest) > LINE_LIMIT:
                raise TraceError(f"{path}, batch {number:,} is longer than {LINE_LIMIT:,} bytes")
    if rest:
        raise TraceError(f"{path}, batch {number:,}: the file ends within it")


def _end(data: bytes, at: int) -> int:
    """Return where the value ends that begins at `at`. Raises `_Incomplete`, `ValueError`."""
    pending = 1
    size = len(data)
    while pending:
        if at >= size:
            raise _Incomplete
        tag = data[at]
        at += 1
        pending -= 1
        if tag < 0x80 or tag >= 0xE0:
            continue
        if tag < 0x90:
            pending += 2 * (tag & 15)
        elif tag < 0xA0:
            pending += tag & 15
        elif tag < 0xC0:
            at += tag & 31
        elif tag in _FIXED:
            at += _FIXED[tag]
        elif tag in _SIZED:
            width, more = _SIZED[tag]
            at += width + more + _number(data, at, width)
        elif tag in _ITEMS:
            width, values = _ITEMS[tag]
            count = values * _number(data, at, width)
            at += width
            numbers = _numbers(count).match(data, at) if _FEW <= count <= _MANY else None
            if numbers is None:
                pending += count
            else:
                at = numbers.end()
        else:
            raise ValueError(f"the byte {tag:#x} begins nothing")
    if at > size:
        raise _Incomplete
    return at


def _number(data: bytes, at: int, width: int) -> int:
    if at + width > len(data):
        raise _Incomplete
    return int.from_bytes(data[at : at + width], "big")


@lru_cache(maxsize=64)
def _numbers(count: int) -> re.Pattern[bytes]:
    """Return a pattern of so many whole numbers that are not negative: token ids, hashes."""
    number = rb"(?:[\x00-\x7f]|\xcd..|\xce.{4}|\xcf.{8}|\xcc.)"
    return re.compile(number + b"{%d}+" % count, re.DOTALL)
