"""Trace files: how their lines become requests, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import TraceError
from quire.sim.trace.chunks import line_chunks
from quire.sim.trace.formats import Layout
from quire.sim.trace.numbering import Addresses, Numbering
from quire.sim.trace.rows import Findings, TraceRequest
from quire.sim.trace.schemas import ChatRow, QuireRow, decode_lines, no_row, why_impossible


class FileTrace:
    """A trace in a file. Every iteration reads it anew; memory grows with its different blocks."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self._path = path
        self._layout = layout
        self.source = str(path)
        self.format = layout.format
        self.block_size = layout.block_size

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.read(Findings())

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        """Yield the requests, and keep the report. Raises `TraceError` at the first bad row."""
        return _FilePass(self._path, self._layout, report).requests()


class _FilePass:
    """One pass over a file."""

    def __init__(self, path: Path, layout: Layout, report: Findings) -> None:
        self._path = path
        self._layout = layout
        self._report = report
        self._numbering = Numbering(str(path))
        self._addresses = Addresses()
        self._chats: dict[int, int] = {}
        self._begin: float | None = 0.0 if layout.has_header else None
        self._last_s = 0.0

    def requests(self) -> Iterator[TraceRequest]:
        decoder = msgspec.json.Decoder(self._layout.row_type)
        report = self._report
        chunks = line_chunks(self._path)
        for chunk in _without_first_line(chunks) if self._layout.has_header else chunks:
            rows, reason = decode_lines(decoder, chunk)
            for row in rows:
                request = self._request(row)
                if request is not None:
                    yield request
            if reason is not None:
                raise no_row(str(self._path), report.rows + 1, reason)
        if report.rows == report.without_prompt:
            raise TraceError(f"{self._path}: none of its {report.rows:,} rows has a prompt")

    def _request(self, row: Any) -> TraceRequest | None:
        """Return the request of a row; None without a prompt. Raises `TraceError`."""
        report, layout = self._report, self._layout
        if self._begin is None:
            self._begin = row.timestamp
        time_s = (row.timestamp - self._begin) / layout.ticks_per_s
        reason = why_impossible(row, layout.block_size, time_s, self._last_s)
        if reason is None and layout.local_ids and row.session_id is None:
            reason = 'session is missing, and the header says that ids are those of a "session"'
        if reason is not None:
            raise no_row(str(self._path), report.rows + 1, reason)
        self._last_s = time_s
        report.rows += 1
        session = self._session(row)
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
            hint=row.hint if isinstance(row, QuireRow) else None,
            duration_s=row.duration_s if isinstance(row, QuireRow) else None,
        )

    def _session(self, row: Any) -> str | None:
        if not isinstance(row, ChatRow):
            return None if row.session_id in (None, "") else str(row.session_id)
        root = self._chats.get(row.parent_chat_id, row.chat_id)
        self._chats[row.chat_id] = root
        return str(root)


def _without_first_line(chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if chunk.strip():
            yield chunk.lstrip().partition(b"\n")[2]
            break
    yield from chunks
