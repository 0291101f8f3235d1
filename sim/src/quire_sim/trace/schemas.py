"""The rows of each format as they stand in a file, and how a line becomes one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np

from quire.core import Hint
from quire.errors import TraceError

MAX_TOKENS = 1 << 27
"""No prompt and no answer is longer, in tokens: what is beyond is a mistake in the file."""

MAX_BLOCK_SIZE = 1 << 20
"""No block has more tokens."""

MAX_SECONDS = 1e10
"""No trace spans more, in seconds: 300 years."""

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
Length: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
Session: TypeAlias = str | int | None

Counts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Times: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]


class Row(msgspec.Struct, gc=False):
    """The fields of most formats: arrival, and lengths in tokens."""

    hint: ClassVar[Hint | None] = None
    duration_s: ClassVar[float | None] = None

    timestamp: float
    input_length: Tokens
    output_length: Tokens


class IdsRow(Row, gc=False):
    """A request of the Mooncake format: an id for each block, a number or text."""

    hash_ids: list[int | str]
    session_id: Session = None


class ChatRow(Row, gc=False):
    """A request of the Bailian format: Mooncake's in seconds, with turns of chats."""

    hash_ids: list[int]
    chat_id: int
    parent_chat_id: int = -1


class RunsRow(Row, gc=False):
    """A request of the run-length format: (first id, how many) for each run of rising ids."""

    hash_runs: list[tuple[int, Length]]
    session_id: Session = None


class QuireRow(
    msgspec.Struct,
    gc=False,
    omit_defaults=True,
    rename={
        "timestamp": "t",
        "input_length": "in",
        "output_length": "out",
        "hash_runs": "runs",
        "session_id": "session",
        "duration_s": "took",
    },
):
    """A request of quire's own format, in seconds."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_runs: Sequence[tuple[int, Length]]
    session_id: str | None = None
    hint: Hint | None = None
    duration_s: Annotated[float, msgspec.Meta(ge=0)] | None = None


class MeasuredRow(
    msgspec.Struct,
    gc=False,
    rename={
        "timestamp": "arrival_s",
        "input_length": "input_tokens",
        "output_length": "output_tokens",
        "hash_ids": "block_ids",
        "duration_s": "total_s",
    },
):
    """A request of a recorded run: its arrival, its lengths, and its measured seconds.

    `ttft_s`      until its first token, `duration_s` until its last one
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int | str]
    ttft_s: Annotated[float, msgspec.Meta(gt=0)]
    duration_s: Annotated[float, msgspec.Meta(gt=0)]
    session_id: ClassVar[Session] = None
    hint: ClassVar[Hint | None] = None


class QuireHeader(msgspec.Struct, kw_only=True):
    """The first line of quire's own format.

    `ids`  "trace": an id means the same in all rows; "session": within its session only
    """

    quire_trace: Literal[1] = 1
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BLOCK_SIZE)]
    ids: Literal["trace", "session"] = "trace"


NO_ROW = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding a line that is no row."""

RUN_ROWS = (RunsRow, QuireRow)
"""The types of rows whose ids come in runs."""


def decode_lines(path: Path, lines: Iterable[bytes], kind: type[Any]) -> Iterator[Any]:
    """Yield each line as a row of a kind. Raises `TraceError` for one that is none."""
    decode = msgspec.json.Decoder(kind).decode
    for number, line in enumerate(lines, 1):
        try:
            row = decode(line)
        except NO_ROW as error:
            raise no_row(path, number, why(error, line)) from None
        yield row


def num_ids_of(row: Any) -> int:
    """Return the number of block ids of a row."""
    if isinstance(row, RUN_ROWS):
        return sum([length for _, length in row.hash_runs])
    return len(row.hash_ids)


def why_impossible(row: Any, block_size: int, time_s: float, last_s: float) -> str | None:
    """Return why a row cannot be that comes after one at `last_s`; None where it can."""
    tokens, num_ids = row.input_length, num_ids_of(row)
    full, most = tokens // block_size, -(-tokens // block_size)
    if time_s < last_s:
        ahead = f"{last_s - time_s:.9g} s"
        return f"time goes backwards: it came {ahead} before the row above; sort the rows by their time"
    if abs(time_s) > MAX_SECONDS:
        return (
            f"it came {time_s:.3g} s after the first request, over the limit of "
            f"{MAX_SECONDS:.0e} s; is the time given in the right unit?"
        )
    if num_ids < full:
        return (
            f"{num_ids:,} block ids are fewer than the {full:,} full blocks of "
            f"{block_size} tokens in a prompt of {tokens:,}; is the block size right?"
        )
    if num_ids > most:
        return (
            f"{num_ids:,} block ids are more than a prompt of {tokens:,} tokens has "
            f"blocks of {block_size} ({most:,}); is the block size right?"
        )
    return None


def are_possible(rows: Sequence[Any], num_ids: Counts, block_size: int, times_s: Times) -> bool:
    """Whether `why_impossible` says nothing of any row; `times_s` are that of the row before them and theirs."""
    tokens = np.array([row.input_length for row in rows])
    fit = (num_ids >= tokens // block_size) & (num_ids <= -(-tokens // block_size))
    rise = (times_s[1:] >= times_s[:-1]) & (np.abs(times_s[1:]) <= MAX_SECONDS)
    return bool((fit & rise).all())


def why(error: Exception, line: bytes) -> str:
    """Return the fault of a line, with the value where it is one."""
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON ({str(error).removeprefix('JSON is malformed: ')}): {excerpt(line)}"
    try:
        return why_not(error, msgspec.json.decode(line))
    except NO_ROW:
        return why_not(error, None)


def why_not(error: msgspec.ValidationError, value: Any) -> str:
    """Return the fault of a decoded value, with the part of it that is meant."""
    reason, _, path = str(error).replace("`", "").partition(" - at $")
    path = path.lstrip(".")
    if not path:
        return f"{reason}: {shortened(repr(value), 60)}"
    try:
        for part in path.replace("[", ".[").lstrip(".").split("."):
            value = value[int(part[1:-1])] if part.startswith("[") else value[part]
    except (LookupError, ValueError, TypeError):
        return f"{path} is not a number that fits: {reason[:1].lower()}{reason[1:]}"
    return f"{path} is {shortened(repr(value))}: {reason[:1].lower()}{reason[1:]}"


def excerpt(line: bytes) -> str:
    """Return the begin of a line, for a message."""
    return repr(shortened(line.strip().decode("utf-8", "replace"), 60))


def shortened(text: str, limit: int = 40) -> str:
    """Return a text of so many characters at most."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def no_row(path: Path, row: int, reason: str) -> TraceError:
    """Return the error for a row that cannot be."""
    return TraceError(f"{path}, row {row:,}: {reason}")
