"""Trace files: their formats, and how they become requests, a chunk of lines at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np

from quire.errors import ConfigError, TraceError
from quire.sim.trace.addresses import Addresses
from quire.sim.trace.batches import Sizes, first_fault, possible_block_sizes, sizes_of
from quire.sim.trace.chunks import line_chunks
from quire.sim.trace.numbering import Numbering
from quire.sim.trace.rows import TraceRequest
from quire.sim.trace.schemas import (
    IdsRow,
    NamesRow,
    RunsRow,
    decode_lines,
    excerpt,
    no_row,
    why,
)

Format: TypeAlias = Literal["mooncake", "hash-runs"]

FORMATS: tuple[Format, ...] = ("mooncake", "hash-runs")

MOONCAKE_BLOCK = 512
"""Tokens per block of the traces published with Mooncake."""

MAX_BLOCK_SIZE = 1 << 20

REFERENCES_AT_ONCE = 1 << 21
"""So many block references are renumbered together."""


class Report(msgspec.Struct):
    """What reading a trace found beside its requests.

    `rows`                 rows read
    `without_prompt`       of these, rows of no prompt tokens, which are left out
    `partial_references`   ids of last, partial blocks, which are left out; `partial_ids` of them
                           are different and name nothing else
    `violations`           references to an id that followed another than at first: the file names
                           blocks by content alone, and its ids were replaced by those of prefixes
    """

    rows: int = 0
    without_prompt: int = 0
    partial_references: int = 0
    partial_ids: int = 0
    violations: int = 0


class FileTrace:
    """A trace in a file. Every iteration reads it anew, in memory for its different blocks only."""

    def __init__(self, path: Path, row_type: type[Any], fmt: Format, block_size: int) -> None:
        self._path = path
        self._row_type = row_type
        self._format: Format = fmt
        self._block_size = block_size

    @property
    def source(self) -> str:
        """The path as it was given."""
        return str(self._path)

    @property
    def format(self) -> Format:
        """The name of its format, one of `FORMATS`."""
        return self._format

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.read(Report())

    def read(self, report: Report) -> Iterator[TraceRequest]:
        """Yield the requests, and fill in the report. Raises `TraceError` at the first bad row."""
        numbering = Numbering(self.source)
        addresses = Addresses(numbering)
        decoder = msgspec.json.Decoder(self._row_type)
        begin_s = last_s = 0.0
        for chunk in line_chunks(self._path):
            rows, reason = decode_lines(decoder, chunk)
            sizes = sizes_of(rows, 1e-3)
            if not report.rows and rows:
                begin_s = last_s = float(sizes.time_s[0])
            fault = first_fault(sizes, self._block_size, begin_s, last_s)
            if fault is not None:
                reason = fault[1]
                rows, sizes = rows[: fault[0]], sizes[: fault[0]]
            for part in _parts(sizes):
                yield from self._requests(
                    rows[part], sizes[part], begin_s, (addresses, numbering), report
                )
            if len(rows):
                last_s = float(sizes.time_s[-1])
            if reason is not None:
                raise no_row(self.source, report.rows + 1, reason)
        report.partial_ids = addresses.num_partial

    def _requests(
        self,
        rows: list[Any],
        sizes: Sizes,
        begin_s: float,
        ids: tuple[Addresses, Numbering],
        report: Report,
    ) -> Iterator[TraceRequest]:
        addresses, numbering = ids
        num_full = sizes.prompt_tokens // self._block_size
        chains = numbering.renumber(addresses.chains(rows, sizes.num_ids, num_full, local=False))
        runs, bounds = chains.as_runs(), chains.bounds.tolist()
        first_row = report.rows + 1
        report.rows += len(rows)
        report.without_prompt += int(np.count_nonzero(sizes.prompt_tokens == 0))
        report.partial_references = addresses.num_partial_references
        report.violations = numbering.num_violations
        for i, (row, time_s) in enumerate(
            zip(rows, (sizes.time_s - begin_s).tolist(), strict=True)
        ):
            if row.input_length:
                session = row.session_id
                yield TraceRequest(
                    first_row + i,
                    time_s,
                    row.input_length,
                    row.output_length,
                    runs[bounds[i] : bounds[i + 1]],
                    str(session) if session is not None else None,
                )


def open_trace(
    path: str | Path,
    *,
    format: Format | None = None,  # noqa: A002 - the word of everybody
    block_size: int | None = None,
) -> FileTrace:
    """Return the trace in a file: plain, gzip or zstd, found out from its content.

    `format`      one of `FORMATS`; None: found out from the first row
    `block_size`  tokens per block; None: what the file says, or what all its first rows agree on

    Raises `TraceError` for a file that is none or holds no rows, `ConfigError` for a block size
    that is not given and cannot be found out. Rows are checked when they are iterated over.
    """
    path = Path(path).expanduser()
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format is one of {', '.join(FORMATS)}, got {format!r}")
    if block_size is not None and not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ConfigError(
            f"a block has between 1 and {MAX_BLOCK_SIZE:,} tokens, got block_size={block_size}"
        )
    head = next((chunk for chunk in line_chunks(path) if chunk.strip()), b"")
    if not head:
        raise TraceError(f"{path} is empty: a trace has at least one request")
    row_type, fmt = _row_type(path, head, format)
    if block_size is None:
        block_size = _guessed_block_size(path, head, row_type)
    return FileTrace(path, row_type, fmt, block_size)


def _row_type(path: Path, head: bytes, wanted: Format | None) -> tuple[type[Any], Format]:
    line = head.lstrip().partition(b"\n")[0]
    try:
        first: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise no_row(str(path), 1, why(error, line)) from None
    keys = cast("dict[str, Any]", first) if isinstance(first, dict) else {}
    if wanted == "hash-runs" or (wanted is None and "hash_runs" in keys):
        return RunsRow, "hash-runs"
    if wanted == "mooncake" or "hash_ids" in keys:
        return (NamesRow if _has_names(head) else IdsRow), "mooncake"
    raise TraceError(
        f"{path} is no trace that is known: a row has hash_ids (mooncake) or hash_runs "
        f"(hash-runs); the first line is {excerpt(line)}"
    )


def _has_names(head: bytes) -> bool:
    """Whether the first id of a file is text."""
    for line in head.split(b"\n"):
        try:
            ids = msgspec.json.decode(line)["hash_ids"]
            if ids:
                return isinstance(ids[0], str)
        except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
            continue
    return False


def _guessed_block_size(path: Path, head: bytes, row_type: type[Any]) -> int:
    rows, reason = decode_lines(msgspec.json.Decoder(row_type), head)
    if not rows:
        raise no_row(str(path), 1, reason or "no row")
    sizes = possible_block_sizes(sizes_of(rows, 1e-3))
    if row_type is not RunsRow and MOONCAKE_BLOCK in sizes:
        return MOONCAKE_BLOCK
    powers = [size for size in (1 << n for n in range(21)) if size in sizes]
    likely = list(sizes) if len(sizes) == 1 else powers
    if len(likely) == 1:
        return likely[0]
    found = f"{sizes[0]} to {sizes[-1]} would fit" if sizes else "no block size fits all of them"
    raise ConfigError(
        f"{path} does not say how many tokens a block has, and its first rows leave it open "
        f"({found}): give block_size"
    )


def _parts(sizes: Sizes) -> list[slice]:
    """Cut rows in parts of about `REFERENCES_AT_ONCE` ids."""
    part = sizes.num_ids.cumsum() // REFERENCES_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    return [slice(a, b) for a, b in pairwise(cuts) if a < b]
