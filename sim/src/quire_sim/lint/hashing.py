"""A log without text for others: names of blocks for replays, and for lint what it found."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from quire.errors import TraceError
from quire_sim.lint.linting import LintedRequest
from quire_sim.lint.reports import LintReport, without_words
from quire_sim.logs.hashed import KEY, LintedRow
from quire_sim.logs.rows import Kind
from quire_sim.trace.bodies import RequestLogTrace
from quire_sim.trace.chunks import create_text
from quire_sim.trace.saving import own_rows
from quire_sim.trace.schemas import QuireHeader
from quire_sim.trace.texts import BLOCK_SIZE, encoder_of


class HashedRows:
    """Findings of each request, without text; memory grows by about a KiB a request."""

    def __init__(self) -> None:
        self._rows: dict[int, deque[LintedRow]] = {}

    def add(self, seen: LintedRequest) -> None:
        """Add a request."""
        request, loss = seen.request, seen.loss
        sections: list[tuple[str, str, Kind, int]] = [
            (each.path, each.role, each.kind, max(len(each.text) + len(each.media), 1))
            for each in request.sections
        ]
        row = LintedRow(
            request.row, request.api, seen.size, seen.hit, seen.hit_chars, sections, model=request.model,
            time_s=request.time_s, place=seen.place, usage=request.usage,
            loss=None if loss is None else without_words(loss),
        )  # fmt: skip
        self._rows.setdefault(request.row, deque()).append(row)

    def save(self, report: LintReport, target: Path) -> int:
        """Write the log of a report without text, and return its requests. Raises `TraceError`."""
        trace = RequestLogTrace(Path(report.source), BLOCK_SIZE, encoder_of(None))
        part = target.with_name(f".{target.name}.part{target.suffix}")
        sessions: dict[str | None, str] = {}
        count = 0
        try:
            with create_text(part) as text:
                encode = msgspec.json.Encoder().encode
                text.write(encode(QuireHeader(block_size=trace.block_size)) + b"\n")
                for request, own in own_rows(trace):
                    waiting = self._rows.get(request.row)
                    if not waiting:
                        continue
                    told = waiting.popleft()
                    told.per_token = report.chars_per_token if report.is_estimated else 0.0
                    fields: dict[str, Any] = msgspec.to_builtins(own) | {KEY: told}
                    if own.session_id is not None:
                        fields["session"] = sessions.setdefault(own.session_id, f"s{len(sessions)}")
                    text.write(encode(fields) + b"\n")
                    count += 1
            if not count:
                raise TraceError(f"{report.source} has no prompts: there is nothing to write")
            os.replace(part, target)  # noqa: PTH105 - Path.replace says the same
        finally:
            part.unlink(missing_ok=True)
        return count
