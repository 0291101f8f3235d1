"""Reuses of blocks in a trace: the two requests, the number of blocks, and the LRU distance.

A hit-ratio curve depends on nothing else. The blocks that one request was the last to use are always
a suffix of its chain, and a later request uses again the beginning of that
suffix. So a request adds a few reuses, however many blocks it has, and a trace of
47 million references becomes 24 thousand reuses.

Both LRU and the optimum are stack algorithms on prefix chains: a cache of C + 1 blocks holds all that
a cache of C blocks holds (R. L. Mattson et al., *Evaluation techniques for storage
hierarchies*, 1970, doi:10.1147/sj.92.0078). So each reuse has one distance, and one pass answers for
every capacity.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeAlias

import msgspec
import numpy as np

from quire.foresight.distances import Floats, lru_distances
from quire_sim.last_uses import LastUses
from quire_sim.trace.rows import TraceRequest

Counts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""One whole number each, int64 [n]."""

Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool]]
"""One yes or no each, bool [n]."""

NUM_GAPS = 32
"""Bins of times between uses, each twice as long as the one before: up to 34 years."""

REQUESTS_AT_ONCE = 1 << 10
"""Requests whose reuses are found together."""

STEPS_AT_ONCE = 1 << 16
"""Steps of a curve that are added up together."""


class Reuses(msgspec.Struct, frozen=True, eq=False):
    """The reuses of a trace, in the order of the requests that reuse, roots first.

    Reuse i: request `later[i]` uses `num_blocks[i]` consecutive blocks of its chain that
    request `earlier[i]` used last. Requests are counted from 0. Of one request the
    earlier ones fall: the deeper the block, the longer ago it was used.

    `prompt_tokens`, `prompt_blocks`   of each request, int64 [requests]
    `block_size`                       tokens per block
    `came_s`                           arrival of each request after the first, float64 [requests]
    """

    earlier: Counts
    later: Counts
    num_blocks: Counts
    prompt_tokens: Counts
    prompt_blocks: Counts
    block_size: int
    came_s: Floats

    @property
    def num_requests(self) -> int:
        """Requests of the trace."""
        return len(self.prompt_tokens)

    @property
    def num_unique(self) -> int:
        """Different blocks of the trace."""
        return int(self.prompt_blocks.sum() - self.num_blocks.sum())

    @property
    def duration_s(self) -> float:
        """Arrival of the last request, after the first."""
        return float(self.came_s[-1]) if len(self.came_s) else 0.0

    @property
    def gaps_s(self) -> Floats:
        """Seconds between the two uses of each reuse, float64 [reuses]."""
        return self.came_s[self.later] - self.came_s[self.earlier]

    def blocks_by_gap(self) -> list[int]:
        """Return the reused blocks by the time since their last use, in powers of two.

        The first entry is within a second, entry n >= 1 after 2**(n - 1) to 2**n seconds.
        """
        _, exponents = np.frexp(self.gaps_s)
        return sums(exponents.clip(0, NUM_GAPS - 1), self.num_blocks, NUM_GAPS).tolist()

    @property
    def seen_blocks(self) -> Counts:
        """Blocks of each request that an earlier one had, int64 [requests]."""
        return sums(self.later, self.num_blocks, self.num_requests)


class Steps(msgspec.Struct, frozen=True, eq=False):
    """Hits by capacity: blocks `below` + 1 ... `below` + `width` each give `request` one more.

    int64 [n] each. Of the blocks of one reuse the last may be further away than the others: the k-th
    block of a step hits in any capacity >= `below` + k.
    """

    below: Counts
    width: Counts
    request: Counts

    def parts(self) -> Iterator[Steps]:
        """Yield the steps, some at a time."""
        for at in range(0, len(self.below), STEPS_AT_ONCE):
            some = slice(at, at + STEPS_AT_ONCE)
            yield Steps(self.below[some], self.width[some], self.request[some])

    def found(self, capacity: int) -> Counts:
        """Return the blocks of each step that a cache of so many finds, int64 [n]."""
        return np.clip(capacity - self.below, 0, self.width)

    def found_by(self, capacity: int, num_requests: int) -> Counts:
        """Return the blocks that each request finds in a cache of so many, int64 [num_requests]."""
        return sums(self.request, self.found(capacity), num_requests)


def lru_steps(read: Reuses) -> Steps:
    """Return the LRU stack distances of all reuses. O(n log requests), n reuses, in NumPy."""
    touched = np.concatenate(([0], read.prompt_blocks))
    below = lru_distances(read.earlier + 1, read.later + 1, read.num_blocks, touched)
    return Steps(below, read.num_blocks, read.later)


def sums(where: Counts, values: Counts, length: int) -> Counts:
    """Return the sum of the values at each place, int64 [length]."""
    total = np.zeros(length, np.int64)
    np.add.at(total, where, values)
    return total


def reuses(requests: Iterable[TraceRequest], block_size: int) -> Reuses:
    """Return the reuses of a trace's requests. O(runs log runs) time, in NumPy; O(unique runs + requests) memory."""
    earlier, later, counts = array("i"), array("i"), array("i")
    tokens, blocks, came_s = array("q"), array("q"), array("d")
    last_uses = LastUses()
    remaining = iter(requests)
    while some := list(islice(remaining, REQUESTS_AT_ONCE)):
        num_runs = np.array([len(request.runs) for request in some])
        runs = np.concatenate([request.runs for request in some], dtype=np.int64)
        now = np.repeat(np.arange(len(tokens), len(tokens) + len(some)), num_runs)
        again = last_uses.use(runs[:, 0], runs[:, 1], now)
        for column, values in zip((earlier, later, counts), again, strict=True):
            column.frombytes(values.astype(np.int32).tobytes())
        summed = np.concatenate(([0], runs[:, 1].cumsum()))[
            np.concatenate(([0], num_runs.cumsum()))
        ]
        blocks.frombytes(np.diff(summed).tobytes())
        tokens.extend([request.prompt_tokens for request in some])
        came_s.extend([request.time_s for request in some])
    del last_uses
    return Reuses(
        _counts(earlier),
        _counts(later),
        _counts(counts),
        prompt_tokens=_counts(tokens),
        prompt_blocks=_counts(blocks),
        block_size=block_size,
        came_s=np.array(came_s),
    )


def _counts(values: array[int]) -> Counts:
    return np.array(values, np.int64)
