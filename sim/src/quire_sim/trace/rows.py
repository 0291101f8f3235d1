"""A trace as its readers see it: a stream of requests, each a chain of block ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from quire.core import Hint

Runs: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""Chains of block ids as runs, int32 [num_runs, 2]: (first id, length), ids rising by one."""

FEW_RUNS = 8
"""So many runs become ids faster one by one than together."""

NO_RUNS: Runs = np.empty((0, 2), np.int32)
"""The runs of a prompt of which the trace names no block."""

Blocks: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int32]]
"""Block ids one by one, int32 [num_blocks]."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One request of a trace: its sizes, and the blocks of its prompt by name.

    `row`         its number in the file, from 1
    `time_s`      arrival in seconds after the first request; never falling
    `runs`        blocks of the prompt that the trace names; the last may be partial
    `session`     whose turn it is, where the trace says so
    `hint`        what its caller said about reuse, where the trace recorded it
    `duration_s`  how long it ran, where the trace recorded it

    Ids are dense, numbered by first appearance, and chained: an id has one predecessor and
    one position, so equal ids mean equal whole prefixes. The first k blocks of a prompt have
    min(k x block size, `prompt_tokens`) tokens.
    """

    row: int
    time_s: float
    prompt_tokens: int
    output_tokens: int
    runs: Runs
    session: str | None = None
    hint: Hint | None = None
    duration_s: float | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt that the trace names."""
        return int(self.runs[:, 1].sum())

    @property
    def blocks(self) -> Blocks:
        """The ids one by one, int32 [num_blocks]."""
        return expand(self.runs)


class Trace(Protocol):
    """A trace: requests in order of arrival. Every iteration reads it anew, from the start.

    `source`      its origin, for people
    `format`      the name of its format
    `block_size`  tokens per block
    """

    source: str
    format: str
    block_size: int

    def __iter__(self) -> Iterator[TraceRequest]: ...


class Findings(msgspec.Struct):
    """Counts and notes of one pass over a trace, beside its requests.

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


class ReportingTrace(ABC):
    """A trace with findings beside its requests: whatever `open_trace` opens, and a workload.

    `names_blocks`  whether it says which prompts have the same blocks
    """

    names_blocks = True

    def __init__(self, source: str, format_name: str, block_size: int) -> None:
        self.source = source
        self.format = format_name
        self.block_size = block_size

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.read(Findings())

    @abstractmethod
    def read(self, report: Findings) -> Iterator[TraceRequest]:
        """Yield the requests, and keep the report. Raises `TraceError` at the first bad row."""


def end_id(request: TraceRequest) -> int:
    """Return one more than the last id of a request: the most there can be; 0 without blocks."""
    return int(request.runs[-1].sum()) if len(request.runs) else 0


def expand(runs: Runs) -> Blocks:
    """Return the ids of runs one by one, int32 [sum of lengths]."""
    if len(runs) == 1:
        first, length = runs[0].tolist()
        return np.arange(first, first + length, dtype=np.int32)
    if 1 < len(runs) <= FEW_RUNS:
        return np.concatenate(
            [np.arange(first, first + length, dtype=np.int32) for first, length in runs.tolist()]
        )
    starts, lengths = runs[:, 0], runs[:, 1]
    ends = lengths.cumsum(dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    offsets = np.repeat(starts - (ends - lengths), lengths)
    return (np.arange(total, dtype=np.int64) + offsets).astype(np.int32)


def add_run(runs: list[tuple[int, int]], first: int, length: int) -> None:
    """Add a run (first, length) to others, to the last one where it continues that."""
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + length
    else:
        runs.append((first, length))


def compress(blocks: Blocks) -> Runs:
    """Return ids as runs: the inverse of `expand`."""
    if not len(blocks):
        return NO_RUNS
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = np.concatenate(([0], cuts))
    lengths = np.diff(np.concatenate((starts, [len(blocks)])))
    return np.stack((blocks[starts], lengths), axis=1).astype(np.int32)
