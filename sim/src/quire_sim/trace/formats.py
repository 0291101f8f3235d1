"""Formats of trace files: detection, and the facts that hold for all rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.errors import ConfigError, TraceError
from quire_sim.trace import schemas
from quire_sim.trace.chunks import line_chunks, lines_in
from quire_sim.trace.lengths import FORMATS as WITH_LENGTHS
from quire_sim.trace.schemas import decode_lines, excerpt, no_row, why

ROWS: dict[str, tuple[type[Any], float]] = {
    "mooncake": (schemas.IdsRow, 1000.0),
    "bailian": (schemas.ChatRow, 1.0),
    "hash-runs": (schemas.RunsRow, 1000.0),
    "quire": (schemas.QuireRow, 1.0),
    "recorded": (schemas.MeasuredRow, 1.0),
}
"""Formats of one request per line: what a line becomes, and the unit of time."""

FORMATS = (*ROWS, "kv-events", "conversations", "requests", *WITH_LENGTHS)

SIGNS = {
    "quire_trace": "quire", "hash_runs": "hash-runs", "chat_id": "bailian", "hash_ids": "mooncake",
    "engine": "recorded",
}  # fmt: skip
"""Formats by a key of their first line, in this order."""

RECORDED_BLOCK = 16
"""Tokens per block of an engine whose recorded run says nothing else: vLLM's own default."""

MOONCAKE_BLOCK = 512
"""Tokens per block of the traces published with Mooncake."""


class Layout(msgspec.Struct, frozen=True):
    """The way to read the rows of a file.

    `row_type`    what a line becomes
    `block_size`  tokens per block
    `ticks_per_s` the unit of time
    `has_header`  the first line is no row, and times count from 0 and not from the first row
    `local_ids`   an id means something only within its session
    """

    format: str
    row_type: type[Any]
    block_size: int
    ticks_per_s: float = 1.0
    has_header: bool = False
    local_ids: bool = False


def layout_of(path: Path, wanted: str | None, block_size: int | None) -> Layout:
    """Return the layout of a file, found out from its first lines where it is not given.

    Raises `TraceError` for a file without rows or of no known format, `ConfigError` for a block
    size that cannot be found out, or is another than the file's.
    """
    head = next((chunk for chunk in line_chunks(path) if chunk.strip()), b"").lstrip()
    if not head:
        raise TraceError(f"{path} is empty: a trace has at least one request")
    line, _, rest = head.partition(b"\n")
    try:
        first: Any = msgspec.json.decode(line)
    except schemas.NO_ROW as error:
        raise no_row(path, 1, why(error, line)) from None
    keys = cast("dict[str, Any]", first) if isinstance(first, dict) else {}
    found = wanted or next((SIGNS[key] for key in SIGNS if key in keys), None)
    if found is None:
        raise TraceError(
            f"{path} is no trace that is known: rows have hash_ids (mooncake, bailian) or hash_runs "
            "(hash-runs), or follow a header (quire, recorded), or are batches of events (kv-events), "
            f"conversations or bodies of requests (requests); the first line is {excerpt(line)}"
        )
    if found == "quire":
        return _quire_layout(path, line, rest, block_size)
    if found == "recorded":
        return _recorded_layout(path, keys, rest, block_size)
    row_type, ticks_per_s = ROWS[found]
    if block_size is None:
        block_size = _guessed_block_size(path, head, row_type)
    return Layout(found, row_type, block_size, ticks_per_s)


def check_block_size(path: Path, own: int, wanted: int | None) -> None:
    """Raise `ConfigError` where another block size is wanted than the file's own."""
    if wanted not in {None, own}:
        raise ConfigError(
            f"{path} has blocks of {own} tokens, not of {wanted}; with_block_size makes larger ones "
            "of them"
        )


def _quire_layout(path: Path, line: bytes, rest: bytes, block_size: int | None) -> Layout:
    try:
        header = msgspec.json.decode(line, type=schemas.QuireHeader)
    except msgspec.DecodeError as error:
        raise TraceError(
            f"{path}: the header of a quire trace is a line like "
            f'{{"quire_trace":1,"block_size":16}}; {why(error, line)}'
        ) from None
    check_block_size(path, header.block_size, block_size)
    if not rest.strip():
        raise TraceError(f"{path} has a header and no rows: a trace has at least one request")
    local = header.ids == "session"
    return Layout("quire", schemas.QuireRow, header.block_size, has_header=True, local_ids=local)


def _recorded_layout(
    path: Path, header: Mapping[str, Any], rest: bytes, block_size: int | None
) -> Layout:
    own = recorded_setting(header, "block_size", RECORDED_BLOCK)
    if not isinstance(own, int) or not 1 <= own <= schemas.MAX_BLOCK_SIZE:
        raise TraceError(f"{path}: block_size in its first line is {own!r}, no number of tokens")
    check_block_size(path, own, block_size)
    if not rest.strip():
        raise TraceError(
            f"{path} has settings and no rows: a recorded run has at least one request"
        )
    return Layout("recorded", schemas.MeasuredRow, own, has_header=True)


def recorded_setting(header: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return a setting of a recorded run by its name, wherever its first line has it.

    The nearest to the top counts that is not null: what a user asked for stands above what the engine
    made of it.
    """
    level: list[Mapping[str, Any]] = [header]
    while level:
        found = [each[name] for each in level if each.get(name) is not None]
        if found:
            return found[0]
        inner = (value for each in level for value in each.values())
        level = [cast("Mapping[str, Any]", value) for value in inner if isinstance(value, dict)]
    return default


def _guessed_block_size(path: Path, head: bytes, row_type: type[Any]) -> int:
    rows: list[Any] = []
    try:
        rows.extend(decode_lines(path, lines_in(head), row_type))
    except TraceError:  # a later row is refused when it is reached
        if not rows:
            raise
    sizes = _possible_block_sizes(rows)
    if row_type not in schemas.RUN_ROWS and MOONCAKE_BLOCK in sizes:
        return MOONCAKE_BLOCK
    powers = [
        size
        for size in (1 << n for n in range(schemas.MAX_BLOCK_SIZE.bit_length()))
        if size in sizes
    ]
    likely = list(sizes) if len(sizes) == 1 else powers
    if len(likely) == 1:
        return likely[0]
    found = f"{sizes[0]:,} to {sizes[-1]:,} fit" if sizes else "none fits all of them"
    raise ConfigError(
        f"{path} does not say how many tokens a block has, and its first rows leave it open "
        f"({found}): say it with block_size (quire trace convert --trace-block-size)"
    )


def _possible_block_sizes(rows: list[Any]) -> range:
    """Return the block sizes for which every row has an id for each block.

    A last, partial block may have an id or none, but the same in all rows. Rows of under two
    ids say too little and are not asked.
    """
    asked = [(row.input_length, n) for row in rows if (n := schemas.num_ids_of(row)) >= 2]
    if not asked:
        return range(0)
    with_partial = range(
        max(-(-tokens // n) for tokens, n in asked),
        min(-(-tokens // (n - 1)) for tokens, n in asked),
    )
    without = range(
        max(tokens // (n + 1) for tokens, n in asked) + 1,
        min(tokens // n for tokens, n in asked) + 1,
    )
    if with_partial and without:
        return range(min(with_partial[0], without[0]), max(with_partial[-1], without[-1]) + 1)
    return with_partial or without
