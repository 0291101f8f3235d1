"""Facts of a trace: sizes, sessions, and distances between the uses of a block."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil

import msgspec
import numpy as np

from quire.foresight.distances import Ints
from quire_sim.reuse import Reuses, lru_steps, reuses
from quire_sim.trace.rows import Findings, ReportingTrace, TraceRequest

SHARES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
"""Percentiles by name: the smallest value that so large a share does not exceed."""

GAPS_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0)
"""Upper ends of the histogram of times between uses, in seconds."""

EVERY = 1024
"""Requests between two reports of progress."""


class Distances(msgspec.Struct, frozen=True):
    """Distances between the uses of a block, over all references to blocks seen before.

    `percentiles`  values by name, see `SHARES`; empty where no block is used again
    `histogram`    (upper end, share of all reuses up to it and above the one before), rising
    """

    percentiles: dict[str, float]
    histogram: list[tuple[float, float]]


class TraceFacts(msgspec.Struct, frozen=True):
    """Sizes, sessions and reuse of a trace.

    `rows`, `without_prompt`     rows of the file; of these, rows without a prompt, left out
    `requests`                   the rest
    `span_s`                     from the first row to the last request, in seconds
    `references`, `unique_blocks`  blocks that prompts name, and different ones
    `footprint_tokens`           room of the different blocks: memory that would keep all
    `violations`                 references that broke the chain rule and were renamed
    `sessions`                   different sessions; 0 where the file names none
    `ceiling`                    share of the prompt tokens in blocks that came before: what a
                                 cache without limit finds
    `prompt_length`, `output_length`  percentiles and the mean, in tokens
    `reuse_blocks`               different blocks used since the last use, and the block itself:
                                 the smallest LRU cache, in blocks, that still has it
    `reuse_seconds`              time since the last use
    `notes`                      how requests were made of what is none
    """

    source: str
    format: str
    block_size: int
    rows: int
    without_prompt: int
    requests: int
    span_s: float
    prompt_tokens: int
    output_tokens: int
    references: int
    unique_blocks: int
    footprint_tokens: int
    violations: int
    sessions: int
    ceiling: float
    prompt_length: dict[str, float]
    output_length: dict[str, float]
    reuse_blocks: Distances
    reuse_seconds: Distances
    notes: list[str] = []


def describe(trace: ReportingTrace, on_progress: Callable[[int], None] | None = None) -> TraceFacts:
    """Read a trace once and return its facts; memory grows with its requests and blocks.

    `on_progress` is told now and then how many requests were read. Raises `TraceError`.
    """
    report = Findings()
    outputs = array("q")
    sessions: set[str] = set()

    def noted() -> Iterator[TraceRequest]:
        for request in trace.read(report):
            outputs.append(request.output_tokens)
            if request.session is not None:
                sessions.add(request.session)
            if on_progress is not None and not len(outputs) % EVERY:
                on_progress(len(outputs))
            yield request

    found = reuses(noted(), trace.block_size)
    prompt_tokens = int(found.prompt_tokens.sum())
    return TraceFacts(
        trace.source,
        trace.format,
        trace.block_size,
        rows=report.rows,
        without_prompt=report.without_prompt,
        requests=found.num_requests,
        span_s=found.duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=sum(outputs),
        references=int(found.prompt_blocks.sum()),
        unique_blocks=found.num_unique,
        footprint_tokens=found.num_unique * trace.block_size,
        violations=report.violations,
        sessions=len(sessions),
        ceiling=_reused_tokens(found) / prompt_tokens,
        prompt_length=_lengths(found.prompt_tokens),
        output_length=_lengths(np.array(outputs, np.int64)),
        reuse_blocks=_in_blocks(found),
        reuse_seconds=_in_seconds(found),
        notes=report.notes,
    )


def _reused_tokens(found: Reuses) -> int:
    """Return the tokens of prompts in blocks that came before."""
    return int(np.minimum(found.seen_blocks * found.block_size, found.prompt_tokens).sum())


def _lengths(values: Ints) -> dict[str, float]:
    ordered = np.sort(values)
    at = {name: int(np.ceil(share * len(ordered))) - 1 for name, share in SHARES.items()}
    found = {name: float(ordered[max(index, 0)]) for name, index in at.items()}
    return found | {"mean": float(values.mean())}


def _in_blocks(found: Reuses) -> Distances:
    steps = lru_steps(found)
    if not len(steps.below):
        return Distances({}, [])
    largest = int((steps.below + steps.width).max())
    ends = [1 << n for n in range(largest.bit_length() + 1) if 1 << n < 2 * largest]
    return _distances(range(largest + 1), ends, lambda end: int(steps.found(int(end)).sum()))


def _in_seconds(found: Reuses) -> Distances:
    gaps = np.unique(found.gaps_s)
    if not len(gaps):
        return Distances({}, [])
    weights = np.bincount(np.searchsorted(gaps, found.gaps_s), found.num_blocks)
    reach = [0, *np.cumsum(weights).astype(np.int64).tolist()]
    ends = [*(end for end in GAPS_S if end < gaps[-1]), float(gaps[-1])]
    return _distances(gaps.tolist(), ends, lambda end: reach[np.searchsorted(gaps, end, "right")])


def _distances(
    values: Sequence[float], ends: Sequence[float], reached: Callable[[float], int]
) -> Distances:
    """Return distances of these values, rising; `reached` gives how many reuses are no further apart."""
    total = reached(values[-1])
    percentiles = {
        name: float(values[bisect_left(values, ceil(share * total), key=reached)])
        for name, share in SHARES.items()
    }
    counts = [reached(end) for end in ends]
    shares = [(count - below) / total for below, count in pairwise([0, *counts])]
    return Distances(percentiles, [*zip(map(float, ends), shares, strict=True)])
