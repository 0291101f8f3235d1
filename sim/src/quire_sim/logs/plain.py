"""Plain prompts, and tables of usage: the formats without bodies."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire_sim.logs.records import has_lines, head_of, records_of
from quire_sim.logs.rows import LoggedRequest, Section, Unread
from quire_sim.trace.chunks import lines_of

TEXT_KEYS = ("prompt", "text", "input", "question", "query", "instruction")
"""Keys that a prompt stands under where a record has no model."""

_USAGE_COLUMNS = (
    "cached_tokens",
    "input_cached_tokens",
    "cache_read_input_tokens",
    "cached_input_tokens",
)


def is_prompt(fields: dict[str, Any]) -> bool:
    """Whether a record is a prompt as text, without a model."""
    return any(isinstance(fields.get(key), str) for key in TEXT_KEYS)


def is_usage_table(head: str) -> bool:
    """Whether a file is a CSV table with a column of cached tokens."""
    columns = [name.strip().strip('"') for name in head.partition("\n")[0].split(",")]
    return len(columns) > 1 and any(name in _USAGE_COLUMNS for name in columns)


def requests(path: Path, unread: Unread) -> Iterator[LoggedRequest]:
    """Yield a request for each prompt: a text in an object, or a line of text."""
    head = head_of(path)
    if head.startswith((b"{", b"[")) and (has_lines(head) or head.startswith(b"[")):
        for record in records_of(path, unread):
            text = next(
                (
                    record.fields[key]
                    for key in TEXT_KEYS
                    if isinstance(record.fields.get(key), str)
                ),
                None,
            )
            if text is None:
                unread.add(f"no text under {', '.join(TEXT_KEYS)}", record.row)
            else:
                yield _prompt(record.row, text)
        return
    for row, line in enumerate(lines_of(path), 1):
        yield _prompt(row, line.decode("utf-8", "replace"))


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV table as objects with their line; whole numbers are numbers."""
    names: list[str] = []
    for row, line in enumerate(lines_of(path), 1):
        cells = next(csv.reader(io.StringIO(line.decode("utf-8", "replace"))), list[str]())
        if not names:
            names = cells
        else:
            pairs = zip(names, cells, strict=False)
            yield (
                row,
                {
                    name: int(cell) if cell.isdigit() and len(cell) < 12 else cell
                    for name, cell in pairs
                },
            )


def _prompt(row: int, text: str) -> LoggedRequest:
    return LoggedRequest(row, "text", (Section("prompt", "user", "text", text),), {"prompt": text})
