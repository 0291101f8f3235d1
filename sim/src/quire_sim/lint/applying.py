"""A mended log: the records of a log with their bodies rewritten, in the format in which they were read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.errors import ConfigError
from quire_sim.lint.mends import Mend, mended
from quire_sim.lint.rewrites import Body, ChangingParts
from quire_sim.logs import LogFile
from quire_sim.logs.entries import request_of
from quire_sim.logs.records import has_lines, head_of, records_of
from quire_sim.logs.rows import Unread

_DEPTH = 5


def write_mended(log: LogFile, path: Path, mends: Sequence[Mend], learned: ChangingParts) -> int:
    """Write a log with mends to a file, and return how many of its records differ.

    Records without a body are written as they are; lines that are no JSON objects are left out. Raises `ConfigError` for a log whose format has no bodies.
    """
    if log.format != "requests":
        raise ConfigError(
            f"--apply writes bodies of requests, and {log.path} is a log of {log.format}; record bodies with quire tap"
        )
    changed = 0
    head = head_of(log.path)
    is_list = not has_lines(head) or head.startswith(b"[")
    with path.open("wb") as file:
        file.write(b"[" if is_list else b"")
        for number, (fields, is_changed) in enumerate(_records(log, mends, learned)):
            changed += is_changed
            file.write(b",\n" if is_list and number else b"")
            file.write(msgspec.json.encode(fields) + (b"" if is_list else b"\n"))
        file.write(b"]\n" if is_list else b"")
    return changed


def _records(
    log: LogFile, mends: Sequence[Mend], learned: ChangingParts
) -> Iterator[tuple[dict[str, Any], bool]]:
    for record in records_of(log.path, Unread()):
        try:
            request = request_of(record)
        except ValueError:
            yield record.fields, False
            continue
        found = mended(request, mends, learned)
        if found is request:
            yield record.fields, False
        else:
            yield (
                cast("dict[str, Any]", _replaced(record.fields, request.body, found.body, _DEPTH)),
                True,
            )


def _replaced(value: Any, body: Body, new: Body, depth: int) -> Any:
    """Return a value of a record with a body in it replaced: as an object, as JSON text, or field by field."""
    if isinstance(value, dict):
        fields = cast("Body", value)
        if fields is body or fields == body:
            return new
        return (
            {name: _replaced(each, body, new, depth - 1) for name, each in fields.items()}
            if depth
            else fields
        )
    if isinstance(value, str) and value.lstrip()[:1] in {"{", "["}:
        try:
            inner = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
        found = _replaced(inner, body, new, depth - 1) if depth else inner
        return value if found == inner else msgspec.json.encode(found).decode()
    if isinstance(value, list):
        for name in ("messages", "input", "tools", "system"):
            if value and value == body.get(name):
                return new[name]
    return cast("Any", value)
