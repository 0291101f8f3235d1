"""Trace files: how their lines become requests, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.errors import TraceError
from quire.sim.trace.addresses import Addresses
from quire.sim.trace.batches import RowSizes, first_fault, sizes_of
from quire.sim.trace.chunks import line_chunks
from quire.sim.trace.formats import Layout
from quire.sim.trace.numbering import Numbering
from quire.sim.trace.report import Findings
from quire.sim.trace.rows import TraceRequest
from quire.sim.trace.schemas import ChatRow, QuireRow, decode_lines, no_row

REFERENCES_AT_ONCE = 1 << 21
"""So many block references are renumbered together."""


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
        self._addresses = Addresses(self._numbering)
        self._chats: dict[int, int] = {}
        self._begin: float | None = 0.0 if layout.has_header else None

    def requests(self) -> Iterator[TraceRequest]:
        decoder = msgspec.json.Decoder(self._layout.row_type)
        report = self._report
        last_s = 0.0
        for chunk in self._row_chunks():
            rows, reason = decode_lines(decoder, chunk)
            if not rows and reason is None:
                continue
            if self._begin is None and rows:
                self._begin = rows[0].timestamp
            sizes = sizes_of(rows, self._begin or 0.0, self._layout.ticks_per_s)
            fault = first_fault(sizes, self._layout.block_size, last_s)
            if self._layout.local_ids:
                fault = _without_session(rows, fault)
            if fault is not None:
                reason = fault[1]
                rows, sizes = rows[: fault[0]], sizes[: fault[0]]
            for part in _parts(sizes):
                yield from self._renumbered(rows[part], sizes[part])
            if rows:
                last_s = float(sizes.time_s[-1])
            if reason is not None:
                raise no_row(str(self._path), report.rows + 1, reason)
        if report.rows == report.without_prompt:
            raise TraceError(f"{self._path}: none of its {report.rows:,} rows has a prompt")

    def _row_chunks(self) -> Iterator[bytes]:
        chunks = line_chunks(self._path)
        if not self._layout.has_header:
            return chunks
        return _without_first_line(chunks)

    def _renumbered(self, rows: list[Any], sizes: RowSizes) -> Iterator[TraceRequest]:
        report = self._report
        addresses = self._addresses.chains(rows, sizes.num_ids, local=self._layout.local_ids)
        chains = self._numbering.renumber(addresses)
        runs, bounds = chains.as_runs(), chains.bounds.tolist()
        first_row = report.rows + 1
        report.rows += len(rows)
        report.without_prompt += int(np.count_nonzero(sizes.prompt_tokens == 0))
        report.violations = self._numbering.num_violations
        sessions = self._sessions(rows)
        extras = isinstance(rows[0], QuireRow)
        times = sizes.time_s.tolist()
        for i, (row, time_s, session) in enumerate(zip(rows, times, sessions, strict=True)):
            if row.input_length:
                yield TraceRequest(
                    first_row + i,
                    time_s,
                    row.input_length,
                    row.output_length,
                    runs[bounds[i] : bounds[i + 1]],
                    session,
                    row.hint if extras else None,
                    row.duration_s if extras else None,
                )

    def _sessions(self, rows: list[Any]) -> list[str | None]:
        if not isinstance(rows[0], ChatRow):
            ids = [row.session_id for row in rows]
            return [None if id_ is None or id_ == "" else str(id_) for id_ in ids]
        roots: list[str | None] = []
        for row in rows:
            chat: int = row.chat_id
            root = self._chats.get(row.parent_chat_id, chat)
            self._chats[chat] = root
            roots.append(str(root))
        return roots


def _without_first_line(chunks: Iterator[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        if chunk.strip():
            yield chunk.lstrip().partition(b"\n")[2]
            break
    yield from chunks


def _without_session(rows: list[Any], fault: tuple[int, str] | None) -> tuple[int, str] | None:
    """Return the first row without a session if it comes before a fault, else the fault."""
    for i, row in enumerate(rows[: fault[0]] if fault else rows):
        if row.session_id is None:
            return i, 'session is missing, and the header says that ids are those of a "session"'
    return fault


def _parts(sizes: RowSizes) -> list[slice]:
    """Cut rows in parts of about `REFERENCES_AT_ONCE` ids."""
    part = sizes.num_ids.cumsum() // REFERENCES_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(part)]
    return [slice(a, b) for a, b in pairwise(cuts) if a < b]
