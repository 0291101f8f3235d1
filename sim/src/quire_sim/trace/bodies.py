"""Request logs as traces: each logged request is one, with its own prompt."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.media import MediaTable
from quire.core.tokens import TOKEN_BYTES, key_of
from quire.errors import TraceError
from quire.exchange.hashing import chain, root_digest
from quire.scope import Scope
from quire_sim.logs import LoggedRequest, open_log
from quire_sim.trace.rows import Findings, ReportingTrace, TraceRequest, compress
from quire_sim.trace.texts import Encoder

AHEAD = 10_000
"""Requests that wait for an earlier one further down: logs are written when requests end."""

PER_S = 1.0
"""Requests per second of a log without times."""


class RequestLogTrace(ReportingTrace):
    """The trace in a request log; memory grows with its different blocks."""

    def __init__(self, path: Path, block_size: int, encoder: Encoder) -> None:
        super().__init__(str(path), "requests", block_size)
        self._path = path
        self._encoder = encoder

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        log = open_log(self._path)
        numbers: dict[bytes, int] = {}
        begin, last, late = None, 0.0, 0
        for request, tokens, names in self._in_order(log, report):
            time_s = request.time_s if request.time_s is not None else report.rows / PER_S
            begin = time_s if begin is None else begin
            late += time_s - begin < last
            last = max(last, time_s - begin)
            ids = [numbers.setdefault(name, len(numbers)) for name in names]
            usage = request.usage
            yield TraceRequest(
                request.row,
                last,
                tokens,
                usage.output_tokens or self._length(request.answer or ""),
                compress(np.array(ids, np.int32)),
                request.session or None,
                None,
                request.duration_s,
            )
        if begin is None:
            raise TraceError(f"{self._path} has tokens and no prompts: quire lint reads it")
        self._note(log.unread.sentences(), late, report)

    def _in_order(
        self, log: Any, report: Findings
    ) -> Iterator[tuple[LoggedRequest, int, list[bytes]]]:
        """Yield requests by time, with their tokens and the names of their blocks."""
        waiting: list[tuple[float, int, LoggedRequest, int, list[bytes]]] = []
        has_times = False
        for request in log:
            if request.api == "usage":
                report.without_prompt += 1
                continue
            report.rows += 1
            has_times |= request.time_s is not None
            at = request.time_s if request.time_s is not None else float(report.rows)
            tokens, names = self._blocks(request)
            heapq.heappush(
                waiting, (at, report.rows, request_without_texts(request), tokens, names)
            )
            if len(waiting) > AHEAD:
                yield heapq.heappop(waiting)[2:]
        while waiting:
            yield heapq.heappop(waiting)[2:]
        if not has_times:
            report.notes.append("the log has no times: a request per second is taken")

    def _blocks(self, request: LoggedRequest) -> tuple[int, list[bytes]]:
        """Return the tokens of a prompt, and a name for each full block: of it and all before it."""
        texts = [f"{each.role}\n{each.text}{each.media}\n" for each in request.sections]
        tokens = np.concatenate([*self._encoder.encode(texts)])
        root = root_digest(Scope(salt=request.salt, model=request.model))
        digests = chain(root, key_of(tokens), self.block_size * TOKEN_BYTES, MediaTable())
        return len(tokens), [digest[:16] for digest in digests]

    def _length(self, text: str) -> int:
        return len(self._encoder.encode([text])[0]) if text else 0

    def _note(self, unread: list[str], late: int, report: Findings) -> None:
        report.notes.append(
            f"each logged request is one; prompts are tokenized here ({self._encoder.name}), tools first, "
            "without a model's template"
        )
        if late:
            report.notes.append(
                f"{late:,} requests came before the one above: they count at its time"
            )
        report.notes += unread


def request_without_texts(request: LoggedRequest) -> LoggedRequest:
    """Return a request without the texts of its prompt."""
    return LoggedRequest(
        request.row, request.api, (), model=request.model, time_s=request.time_s, duration_s=request.duration_s,
        session=request.session, answer=request.answer, usage=request.usage,
    )  # fmt: skip
