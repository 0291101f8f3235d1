"""Records of a log: the objects of JSON Lines or of a JSON list, one at a time."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from quire.errors import TraceError
from quire_sim.logs.rows import Unread
from quire_sim.trace.chunks import LINE_LIMIT, lines_of, open_text, read_some

_BOM = b"\xef\xbb\xbf"
_SPACE = re.compile(r"[\s,]*")

WITHIN = ("entries", "resourceSpans", "data", "observations", "requests", "logs", "items")
"""Names of the list of records within one object: of HAR files, of OTLP, of exports."""


_WITHIN = r'"(?:{})"\s*:\s*\['.format("|".join(WITHIN))


class LogRecord(NamedTuple):
    """An object of a log and its line, or its place in a list, from 1."""

    row: int
    fields: dict[str, Any]


def head_of(path: Path) -> bytes:
    """Return the first bytes of a log without the mark of byte order and blanks."""
    with open_text(path) as stream:
        return read_some(stream, path).removeprefix(_BOM).lstrip()


def has_lines(head: bytes) -> bool:
    """Whether a file of objects has one per line, by its first bytes."""
    line, _, rest = head.partition(b"\n")
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if rest.strip() or not isinstance(value, dict):
        return True
    fields = cast("dict[str, Any]", value)
    fields = fields["log"] if isinstance(fields.get("log"), dict) else fields
    return not any(isinstance(fields.get(name), list) for name in WITHIN)


def records_of(path: Path, unread: Unread) -> Iterator[LogRecord]:
    """Yield the objects of a log one at a time; memory stays that of the largest.

    A line that is no JSON object is counted as unread. Raises `TraceError` for a list that is damaged.
    """
    head = head_of(path)
    if head.startswith(b"["):
        yield from _listed(path)
    elif has_lines(head) or not head.startswith(b"{"):
        yield from _lines(path, unread)
    else:
        yield from _listed(path, within=True)


def objects_in(text: str, most: int) -> list[LogRecord]:
    """Return the first whole objects of a text that begins a list, or an object with one in it."""
    begin = re.compile(r"\[" if text.startswith("[") else _WITHIN)
    found = begin.search(text)
    at, rows = found.end() if found else len(text), list[LogRecord]()
    decode = json.JSONDecoder().raw_decode
    while len(rows) < most and (space := _SPACE.match(text, at)) and space.end() < len(text):
        try:
            value, at = decode(text, space.end())
        except (json.JSONDecodeError, RecursionError):
            break
        if isinstance(value, dict):
            rows.append(LogRecord(len(rows) + 1, cast("dict[str, Any]", value)))
    return rows


def _lines(path: Path, unread: Unread) -> Iterator[LogRecord]:
    decode = msgspec.json.Decoder().decode
    for row, line in enumerate(lines_of(path), 1):
        try:
            value = decode(line.removeprefix(_BOM))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            unread.add(f"no JSON ({_reason(error)})", row)
            continue
        if isinstance(value, dict):
            yield LogRecord(row, cast("dict[str, Any]", value))
        else:
            unread.add("no JSON object", row)


def _reason(error: Exception) -> str:
    return re.sub(r" \(byte \d+\)", "", str(error).removeprefix("JSON is malformed: "))


def _listed(path: Path, *, within: bool = False) -> Iterator[LogRecord]:
    """Yield the objects of a list; `within` one object, under a name of `WITHIN`."""
    decode = json.JSONDecoder().raw_decode
    begin = re.compile(_WITHIN) if within else re.compile(r"\[")
    text, row, at = "", 0, -1
    for piece, is_last in _pieces(path):
        text += piece
        if at < 0:
            found = begin.search(text)
            if found is None:
                _check_length(path, row, text, is_last=is_last)
                continue
            at = found.end()
        while True:
            space = _SPACE.match(text, at)
            at = space.end() if space else at
            if at == len(text):
                break
            if text[at] == "]":
                return
            try:
                value, end = decode(text, at)
            except (json.JSONDecodeError, RecursionError) as error:
                if is_last or len(text) - at > LINE_LIMIT or isinstance(error, RecursionError):
                    raise TraceError(f"{path}, record {row + 1:,}: not JSON ({error})") from None
                break
            if end == len(text) and not is_last and not isinstance(value, dict):
                break
            at, row = end, row + 1
            if isinstance(value, dict):
                yield LogRecord(row, cast("dict[str, Any]", value))
        text, at = text[at:], 0
    raise TraceError(f"{path}, record {row + 1:,}: the file ends within the list")


def _check_length(path: Path, row: int, text: str, *, is_last: bool) -> None:
    if is_last or len(text) > LINE_LIMIT:
        names = ", ".join(WITHIN)
        raise TraceError(f"{path}, record {row + 1:,}: no list of records is found ({names})")


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    with open_text(path) as stream:
        while piece := read_some(stream, path):
            yield decoder.decode(piece), False
        yield decoder.decode(b"", final=True), True
