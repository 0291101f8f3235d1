"""What reading a trace found beside its requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from quire.sim.trace.rows import Trace, TraceRequest


class Findings(msgspec.Struct):
    """What reading a trace found beside its requests.

    `rows`                rows read: of events, batches; of conversations, their answers
    `without_prompt`      of these, rows of no prompt tokens, which are left out
    `violations`          references to an id that followed another than at first: the file names
                          blocks by content alone, and its ids were replaced by those of prefixes
    `notes`               sentences for people: how requests were made of what is none
    """

    rows: int = 0
    without_prompt: int = 0
    violations: int = 0
    notes: list[str] = msgspec.field(default_factory=list[str])


class ReportingTrace(Trace, Protocol):
    """A trace that says what it found beside its requests: whatever `open_trace` opens."""

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        """Yield the requests, and keep the report. Raises `TraceError` at the first bad row."""
        ...
