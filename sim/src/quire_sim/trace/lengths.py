"""Traces of lengths and times in CSV files: Azure's, BurstGPT's and Vidur's, which name no blocks."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

import msgspec

from quire.errors import TraceError
from quire_sim.trace.chunks import lines_of
from quire_sim.trace.rows import NO_RUNS, Findings, ReportingTrace, TraceRequest
from quire_sim.trace.schemas import MAX_SECONDS, MAX_TOKENS, no_row, shortened

BLOCK = 16
"""Tokens per block where nothing else is asked for: vLLM's own default."""


class Columns(msgspec.Struct, frozen=True):
    """The columns of a format, by their names in lower case. Empty: it has none."""

    time: str
    prompt: str
    output: str
    session: str = ""
    took: str = ""


FORMATS = {
    "azure": Columns("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": Columns(
        "timestamp", "request tokens", "response tokens", "session id", "elapsed time"
    ),
    "vidur": Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
}
"""Sources: AzureLLMInferenceTrace (2023, 2024, and 2025 with images), BurstGPT (releases 1 and 2), the
processed traces of Vidur."""

SAYS = "; ".join(
    f"{name}: {columns.time}, {columns.prompt}, {columns.output}"
    for name, columns in FORMATS.items()
)


class LengthsTrace(ReportingTrace):
    """A trace of lengths and times: each prompt is one that nobody else has."""

    names_blocks = False

    def __init__(self, path: Path, format_name: str, block_size: int = BLOCK) -> None:
        super().__init__(str(path), format_name, block_size)
        self._path = path

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        columns = FORMATS[self.format]
        rows = _rows(self._path)
        names = [name.strip().lower() for name in next(rows)]
        missing = {columns.time, columns.prompt, columns.output} - set(names)
        if missing:
            raise TraceError(
                f"{self._path} has no column {', '.join(sorted(missing))} of the format {self.format}; its "
                f"columns are {', '.join(names)}"
            )
        begin: float | None = None
        last_s, failed = 0.0, 0
        for values in rows:
            report.rows += 1
            fields = _Fields(self._path, report.rows, dict(zip(names, values, strict=False)))
            at = fields.seconds(columns.time)
            begin = at if begin is None else begin
            if at - begin < last_s:
                reason = f"time goes backwards by {begin + last_s - at:.9g} s; sort the rows by their time"
                raise no_row(self._path, report.rows, reason)
            last_s = at - begin
            if last_s > MAX_SECONDS:
                reason = (
                    f"it came {last_s:.3g} s after the first, over the limit of {MAX_SECONDS:.0e} s"
                )
                raise no_row(self._path, report.rows, reason)
            prompt, output = fields.tokens(columns.prompt), fields.tokens(columns.output)
            if not prompt:
                report.without_prompt += 1
                continue
            if not output:
                failed += 1
                continue
            yield TraceRequest(
                report.rows,
                last_s,
                prompt,
                output,
                NO_RUNS,
                fields.get(columns.session) or None,
                None,
                fields.seconds(columns.took) if fields.get(columns.took) else None,
            )
        if report.rows == report.without_prompt + failed:
            raise TraceError(
                f"{self._path}: none of its {report.rows:,} rows has a prompt and an answer"
            )
        report.notes.append("it names no blocks, so each prompt is new and nothing is found again")
        if failed:
            report.notes.append(f"{failed:,} requests without an answer are left out")
        if "numimages" in names:
            report.notes.append("images are left out: its tokens are those of texts")


def lengths_format(head: bytes, path: Path) -> str | None:
    """Return the format of a CSV file by its first line; None for one that is no CSV file.

    Raises `TraceError` for a CSV file with other columns.
    """
    line = head.partition(b"\n")[0].decode("utf-8", "replace").strip()
    names = [name.strip().strip('"').lower() for name in line.split(",")]
    if len(names) < 2 or not all(name and name[0].isalpha() for name in names):
        return None
    for name, columns in FORMATS.items():
        if {columns.prompt, columns.output} <= set(names):
            if columns.time in names:
                return name
            raise TraceError(
                f"{path} has lengths and no times: add a column {columns.time}, in "
                f"{'seconds' if name != 'azure' else 'date and time'}, to play it"
            )
    raise TraceError(
        f"{path} is a CSV file of no trace that is known; its columns are {shortened(line, 80)}. Rename the "
        f"columns of times and lengths to those of one of these: {SAYS}"
    )


class _Fields:
    """The values of a row by the names of their columns."""

    def __init__(self, path: Path, row: int, values: Mapping[str, str]) -> None:
        self._path, self._row, self._values = path, row, values

    def get(self, name: str) -> str:
        return self._values.get(name, "").strip()

    def tokens(self, name: str) -> int:
        text = self.get(name)
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number <= MAX_TOKENS or number != int(number):
            reason = f"{name} is {shortened(text)!r}; it is a whole number of 0 to {MAX_TOKENS:,}"
            raise no_row(self._path, self._row, reason)
        return int(number)

    def seconds(self, name: str) -> float:
        text = self.get(name)
        for read in (float, _time):
            try:
                found = read(text)
            except (ValueError, OverflowError, OSError):
                continue
            if isfinite(found):
                return found
        reason = f"{name} is {shortened(text)!r}; it is seconds, or a date and time"
        raise no_row(self._path, self._row, reason)


def _time(text: str) -> float:
    """Return the seconds of a date and time, UTC where it names no zone."""
    found = datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _rows(path: Path) -> Iterator[Sequence[str]]:
    """Yield the rows of a CSV file, its names first. Raises `TraceError`."""
    lines = (line.decode("utf-8-sig", "replace").rstrip("\r") for line in lines_of(path))
    try:
        yield from csv.reader(lines)
    except csv.Error as error:
        raise TraceError(f"{path} is no CSV file: {error}") from error
