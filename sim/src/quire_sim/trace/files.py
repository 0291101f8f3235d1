"""Trace files: how their lines become requests, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import TraceError
from quire_sim.trace.chunks import lines_of
from quire_sim.trace.dense import DenseIds
from quire_sim.trace.formats import Layout
from quire_sim.trace.numbering import Addresses, Numbering
from quire_sim.trace.rows import Findings, ReportingTrace, Runs, TraceRequest
from quire_sim.trace.schemas import (
    RUN_ROWS,
    ChatRow,
    are_possible,
    decode_lines,
    no_row,
    why_impossible,
)

ROWS_AT_ONCE = 512
"""Rows of runs whose ids are looked over together."""


class FileTrace(ReportingTrace):
    """A trace in a file. Every iteration reads it anew; memory grows with its different blocks."""

    def __init__(self, path: Path, layout: Layout) -> None:
        super().__init__(str(path), layout.format, layout.block_size)
        self._path = path
        self._layout = layout

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        return _FilePass(self._path, self._layout, report).requests()


class _FilePass:
    """One pass over a file."""

    def __init__(self, path: Path, layout: Layout, report: Findings) -> None:
        self._path = path
        self._layout = layout
        self._report = report
        self._numbering = Numbering(str(path))
        self._addresses = Addresses()
        names_all = issubclass(layout.row_type, RUN_ROWS) and not layout.local_ids
        self._dense = DenseIds(str(path)) if names_all else None
        self._chats: dict[int, int] = {}
        self._begin: float | None = 0.0 if layout.has_header else None
        self._last_s = 0.0

    def requests(self) -> Iterator[TraceRequest]:
        report, lines = self._report, lines_of(self._path)
        if self._layout.has_header:
            next(lines)
        rows = decode_lines(self._path, lines, self._layout.row_type)
        for some in _together(rows) if self._dense is not None else ([row] for row in rows):
            runs = self._dense_runs(some)
            possible = self._are_possible(some, runs)
            for row, row_runs in zip(some, runs, strict=True):
                request = self._request(row, row_runs, possible=possible)
                if request is not None:
                    yield request
        if report.rows == report.without_prompt:
            raise TraceError(f"{self._path}: none of its {report.rows:,} rows has a prompt")

    def _dense_runs(self, rows: list[Any]) -> Sequence[Runs | None]:
        """Return the runs of rows if their ids are dense and chained like all before them; None of each if not."""
        dense = self._dense
        if dense is None:
            return [None] * len(rows)
        runs = dense.runs_of([row.hash_runs for row in rows])
        if runs is not None:
            return runs
        self._dense = None
        for path in dense.paths():
            self._numbering.renumber(self._addresses.of_runs(path))
        return [None] * len(rows)

    def _are_possible(self, rows: list[Any], runs: Sequence[Runs | None]) -> bool:
        """Whether all rows are known to be possible; if not, each is looked at by itself."""
        found = [each for each in runs if each is not None]
        if not found:
            return False
        num_runs = np.array([0, *map(len, found)]).cumsum()
        num_ids = np.concatenate(([0], np.concatenate(found)[:, 1].cumsum()))[num_runs]
        begin = rows[0].timestamp if self._begin is None else self._begin
        times = np.array([row.timestamp for row in rows]) - begin
        times /= self._layout.ticks_per_s
        size = self._layout.block_size
        return are_possible(rows, np.diff(num_ids), size, np.append(self._last_s, times))

    def _request(self, row: Any, runs: Runs | None, *, possible: bool) -> TraceRequest | None:
        """Return the request of a row; None without a prompt. Raises `TraceError`."""
        report, layout = self._report, self._layout
        if self._begin is None:
            self._begin = row.timestamp
        time_s = (row.timestamp - self._begin) / layout.ticks_per_s
        if not possible:
            reason = why_impossible(row, layout.block_size, time_s, self._last_s)
            if reason is None and layout.local_ids and row.session_id is None:
                reason = 'session is missing, and the header says that ids are those of a "session"'
            if reason is not None:
                raise no_row(self._path, report.rows + 1, reason)
        self._last_s = time_s
        report.rows += 1
        session = self._session(row)
        if runs is None:
            runs = self._numbering.renumber(self._addresses.runs_of(row, local=layout.local_ids))
            report.violations = self._numbering.num_violations
        if not row.input_length:
            report.without_prompt += 1
            return None
        return TraceRequest(
            report.rows,
            time_s,
            row.input_length,
            row.output_length,
            runs,
            session,
            row.hint,
            row.duration_s,
        )

    def _session(self, row: Any) -> str | None:
        if not isinstance(row, ChatRow):
            return None if row.session_id in (None, "") else str(row.session_id)
        root = self._chats.get(row.parent_chat_id, row.chat_id)
        self._chats[row.chat_id] = root
        return str(root)


def _together(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield rows in lists; those before one that cannot be read come before the error."""
    some: list[Any] = []
    try:
        for row in rows:
            some.append(row)
            if len(some) == ROWS_AT_ONCE:
                yield some
                some = []
    except TraceError:
        yield some
        raise
    yield some
