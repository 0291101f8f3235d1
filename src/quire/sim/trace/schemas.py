"""The rows of each format as they stand in a file, and how a line becomes one."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from quire.errors import TraceError

MAX_TOKENS = 1 << 27
"""No prompt and no answer is longer, in tokens: what is beyond is a mistake in the file."""

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Session: TypeAlias = str | int | None


class Row(msgspec.Struct, gc=False):
    """What all formats record: arrival in ms, and lengths in tokens."""

    timestamp: float
    input_length: Tokens
    output_length: Tokens


class IdsRow(Row, gc=False):
    """A request of the Mooncake format: an id for each block, the last one perhaps partial."""

    hash_ids: list[int]
    session_id: Session = None


class NamesRow(Row, gc=False):
    """The same with text for ids: digests, say."""

    hash_ids: list[str]
    session_id: Session = None


class RunsRow(Row, gc=False):
    """A request of the run-length format: (first id, how many) for each run of rising ids."""

    hash_runs: list[tuple[int, Length]]
    session_id: Session = None


AnyRow: TypeAlias = IdsRow | NamesRow | RunsRow


class BadLine(Exception):  # noqa: N818 - not an error for callers: where the good rows end
    """A line that is no row; `args[0]` says why."""


def decode_lines(decoder: msgspec.json.Decoder[Any], chunk: bytes) -> tuple[list[Any], str | None]:
    """Return the rows of whole lines, and why the line after them is none."""
    try:
        return decoder.decode_lines(chunk), None
    except (msgspec.DecodeError, UnicodeDecodeError):
        rows: list[Any] = []
        for line in chunk.split(b"\n"):
            if not line.strip():
                continue
            try:
                rows.append(decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return rows, why(error, line)
        return rows, None


def why(error: Exception, line: bytes) -> str:
    """Say what is wrong with a line, with the value where it is one."""
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON ({str(error).removeprefix('JSON is malformed: ')}): {excerpt(line)}"
    reason, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    reason = reason.replace("`", "")
    if not path:
        return f"{reason}: {excerpt(line)}"
    return f"{path} is {_value_at(line, path)}: {reason[:1].lower()}{reason[1:]}"


def excerpt(line: bytes) -> str:
    """Return the begin of a line, for a message."""
    text = line.strip().decode("utf-8", "replace")
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _value_at(line: bytes, path: str) -> str:
    try:
        value: Any = msgspec.json.decode(line)
        for part in path.replace("[", ".[").split("."):
            value = value[int(part[1:-1])] if part.startswith("[") else value[part]
    except (msgspec.DecodeError, LookupError, ValueError, TypeError):
        return "not a number that fits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def no_row(source: str, row: int, reason: str) -> TraceError:
    """Return the error for a row that cannot be."""
    return TraceError(f"{source}, row {row:,}: {reason}")
