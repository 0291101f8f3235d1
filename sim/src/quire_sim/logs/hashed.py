"""Logs without text: rows of quire's own trace format, each with what `quire lint` found of its request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire_sim.logs.records import records_of
from quire_sim.logs.rows import Api, Kind, LoggedRequest, Section, TokenUsage, Unread

KEY = "lint"
"""The field of a trace's row that has a `LintedRow`."""


class LintedRow(msgspec.Struct, omit_defaults=True):
    """A request as it was linted, without text.

    `size`, `hit`  characters of its prompt and of those found; tokens if `per_token` is 0
    `hit_chars`    characters of its sections that are found
    `per_token`    characters of a token
    `sections`     path, role, kind and characters of each
    `place`        the first section that differs from the nearest earlier prompt, None without one
    `loss`         fields of a `Loss` without words
    """

    row: int
    api: Api
    size: float
    hit: float
    hit_chars: float
    sections: list[tuple[str, str, Kind, int]]
    per_token: float = 0.0
    model: str = ""
    time_s: float | None = None
    place: int | None = None
    loss: dict[str, Any] | None = None
    usage: TokenUsage = TokenUsage()


def is_hashed(fields: dict[str, Any]) -> bool:
    """Whether a record is a row of such a log."""
    return KEY in fields and "runs" in fields


def requests(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield the requests; their sections are blanks of the right length, and `body` has the row under `KEY`."""
    for record in records_of(path, unread):
        if "quire_trace" in record.fields:
            continue
        if not is_hashed(record.fields):
            unread.add("a row of a trace without what quire lint found", record.row)
            continue
        try:
            told = msgspec.convert(record.fields[KEY], LintedRow)
        except msgspec.ValidationError as error:
            unread.add(f"{KEY}: {error}", record.row)
            continue
        sections = tuple(
            Section(place, role, kind, " " * size) for place, role, kind, size in told.sections
        )
        session = str(record.fields.get("session") or "")
        yield LoggedRequest(
            told.row, told.api, sections, {KEY: told}, told.model, told.time_s, session=session, usage=told.usage
        )  # fmt: skip
