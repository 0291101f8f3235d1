"""Exact hit-ratio curves over all capacities, for LRU and for the optimum."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire_sim.executors import Executor, Serial
from quire_sim.optimum import BOUNDS, optimum_steps, reachable_steps, weighed
from quire_sim.reuse import Counts, Reuses, Steps, lru_steps, reuses, sums
from quire_sim.trace.rows import Trace

Ratios: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Ratios between 0 and 1, float64 [n]."""

MANY_REQUESTS = 50_000
"""So many requests take longer to compute than processes to begin."""

STEPS: dict[str, Callable[[Reuses], Iterable[Steps]]] = {
    "reachable": reachable_steps,
    "optimum": optimum_steps,
    "lru": lambda read: lru_steps(read).parts(),
}
"""The steps of each curve; what takes longest comes first."""


class Curve(msgspec.Struct, frozen=True, eq=False):
    """Prompt tokens found cached, by the capacity of the cache.

    `capacities`     rising, from 0, in blocks, int64 [points]
    `hit_tokens`     found at each of them, int64 [points]
    `prompt_tokens`  all that were asked for

    Between two points the curve is a straight line. Unless it was thinned, that is exact: the
    points are the corners. Beyond the last point it is flat.
    """

    capacities: Counts
    hit_tokens: Counts
    prompt_tokens: int

    @property
    def token_hit(self) -> Ratios:
        """Share of the prompt tokens found at each capacity, float64 [points]."""
        return self.hit_tokens / max(self.prompt_tokens, 1)

    @property
    def ceiling(self) -> float:
        """The hit ratio without a limit of memory."""
        return float(self.token_hit[-1])

    def at(self, capacity_blocks: int) -> float:
        """Return the share of the prompt tokens that a cache of this capacity finds.

        Raises `ConfigError` for a negative capacity.
        """
        found = self._tokens_at(_capacities([capacity_blocks]))
        return float(found[0]) / max(self.prompt_tokens, 1)

    def tiers(self, capacities_blocks: Sequence[int]) -> list[float]:
        """Return the share of the prompt tokens found in each tier of an exclusive hierarchy.

        Each tier has the capacity given, in blocks, the fastest first; what falls out of one goes
        down to the next, and what is used comes up to the first. What no tier has is the rest to 1.
        Raises `ConfigError` for a negative capacity.
        """
        below = np.cumsum(_capacities(capacities_blocks))
        found = self._tokens_at(below) / max(self.prompt_tokens, 1)
        return np.diff(found, prepend=0.0).tolist()

    def capacity_for(self, share: float) -> int:
        """Return the smallest capacity, in blocks, that finds this share of the ceiling.

        Raises `ConfigError` for a share outside 0 ... 1.
        """
        if not 0 <= share <= 1:
            raise ConfigError(f"a share of the ceiling is between 0 and 1, got {share!r}")
        wanted = share * float(self.hit_tokens[-1])
        after = int(np.searchsorted(self.hit_tokens, wanted))
        if after == 0:
            return 0
        x, y = self.capacities, self.hit_tokens
        slope = (y[after] - y[after - 1]) / (x[after] - x[after - 1])
        return int(x[after - 1] + np.ceil((wanted - y[after - 1]) / slope))

    def thinned(self, max_points: int, keep: Sequence[int] = ()) -> Curve:
        """Return the curve through about `max_points` of its points, and those at `keep`.

        The values are exact at the capacities of the new curve; they are close in hit ratio
        and in the order of magnitude of the capacity, so a line or a step between them is near.
        Raises `ConfigError` for fewer than 2 points or a negative capacity.
        """
        if max_points < 2:
            raise ConfigError(f"a curve needs at least 2 points, got {max_points}")
        kept = _capacities(keep)
        x, y = self.capacities, self.hit_tokens
        last = int(x[-1])
        levels = np.linspace(0, int(y[-1]), max_points // 2)
        by_hit = np.ceil(np.interp(levels, y, x)).astype(np.int64)
        by_size = np.geomspace(1, last + 1, max_points - len(levels)).astype(np.int64) - 1
        chosen = np.unique(np.concatenate(([0, last], by_hit, by_size, kept)))
        return Curve(chosen, self._tokens_at(chosen), self.prompt_tokens)

    def _tokens_at(self, capacities: Counts) -> Counts:
        """Hit tokens at capacities, in whole numbers: no rounding anywhere on an exact curve."""
        x, y = self.capacities, self.hit_tokens
        before = np.searchsorted(x, capacities, side="right") - 1
        after = np.minimum(before + 1, len(x) - 1)
        width = np.maximum(x[after] - x[before], 1)
        return y[before] + (y[after] - y[before]) * (capacities - x[before]) // width


class Curves(msgspec.Struct, frozen=True, eq=False):
    """The curves of LRU and of two upper bounds, which no policy exceeds, of one trace.

    `optimum`        Belady's rule; a block may be left out at once
    `reachable`      the same where a request holds its blocks while it runs, as in every pool
                     Both are exact but for last, partial blocks, see `quire_sim.optimum.weighed`
    `num_unique`     different blocks: a capacity that never evicts
    `seconds`        CPU time to read the trace and compute both
    """

    lru: Curve
    optimum: Curve
    reachable: Curve
    num_unique: int
    num_requests: int
    block_size: int
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that hits are counted against."""
        return self.lru.prompt_tokens

    @property
    def ceiling(self) -> float:
        """The hit ratio without a limit of memory; the same for every policy."""
        return self.lru.ceiling


def curves(trace: Trace, *, count_from: int = 0) -> Curves:
    """Read a trace once and return the curves of LRU and of both bounds, over all capacities.

    Requests before number `count_from`, counted from 0, only warm the cache up. k blocks found
    are min(k x block size, prompt) tokens. Raises `TraceError`, and `ConfigError` for a
    `count_from` that leaves no request to count.
    """
    begun = time.process_time()
    both = curves_of(reuses(trace, trace.block_size), count_from=count_from)
    return msgspec.structs.replace(both, seconds=time.process_time() - begun)


def curves_of(read: Reuses, *, count_from: int = 0, executor: Executor | None = None) -> Curves:
    """Return the curves of a trace that was read already; see `curves`.

    Those of at least `MANY_REQUESTS` are computed at a time where an executor can.
    """
    _check_count_from(count_from, read.num_requests)
    is_long = read.num_requests >= MANY_REQUESTS
    where = executor if executor is not None and is_long else Serial()
    done = dict(where.run(partial(_timed, read, count_from), [*STEPS]))
    curves = {name: done[number][0] for number, name in enumerate(STEPS)}
    seconds = sum(seconds for _, seconds in done.values())
    return Curves(
        **curves,
        num_unique=read.num_unique,
        num_requests=read.num_requests,
        block_size=read.block_size,
        seconds=seconds,
    )


def _timed(read: Reuses, count_from: int, name: str) -> tuple[Curve, float]:
    """Return a curve of `STEPS`, and the CPU time that it took."""
    begun = time.process_time()
    ends = np.zeros(read.num_requests, np.int64)
    if name in BOUNDS:
        read, ends = weighed(read)
    curve = _curve(STEPS[name](read), read, count_from, ends)
    return curve, time.process_time() - begun


def _curve(parts: Iterable[Steps], read: Reuses, count_from: int, ends: Counts) -> Curve:
    """Add up steps: each is a slope of one block per block of capacity, for its width.

    `ends` are tokens of last blocks that are found from the capacity on that holds their prompt.
    """
    corners, rises = np.zeros(1, np.int64), np.zeros(1, np.int64)
    found, whole = (np.zeros(read.num_requests, np.int64) for _ in range(2))
    for steps in parts:
        counted = steps.request >= count_from
        below, request = steps.below[counted], steps.request[counted]
        stop = below + steps.width[counted]
        np.add.at(found, request, stop - below)
        np.maximum.at(whole, request, stop)
        corners, rises = _with_turns(corners, rises, below, stop)
    short_at, short_by = _partial_blocks(found, whole, read)
    at = count_from + np.flatnonzero(ends[count_from:])
    short_at = np.concatenate((short_at, read.prompt_blocks[at]))
    short_by = np.concatenate((short_by, -ends[at]))
    rises_at, corners = corners, np.unique(np.concatenate((corners, short_at - 1, short_at)))
    slopes = np.zeros(len(corners), np.int64)
    slopes[corners.searchsorted(rises_at)] = rises
    slopes = slopes.cumsum() * read.block_size
    drops = sums(corners.searchsorted(short_at), short_by, len(corners))
    hits = np.concatenate(([0], (slopes[:-1] * np.diff(corners)).cumsum())) - drops.cumsum()
    return Curve(corners, hits, int(read.prompt_tokens[count_from:].sum()))


def _with_turns(
    corners: Counts, rises: Counts, begin: Counts, stop: Counts
) -> tuple[Counts, Counts]:
    """Return the capacities at which the slope changes, and by how much, with steps that begin and stop at more."""
    merged = np.unique(np.concatenate((corners, begin, stop)))
    changed = np.bincount(merged.searchsorted(begin), minlength=len(merged))
    changed -= np.bincount(merged.searchsorted(stop), minlength=len(merged))
    changed[merged.searchsorted(corners)] += rises
    return merged, changed


def _partial_blocks(found: Counts, whole: Counts, read: Reuses) -> tuple[Counts, Counts]:
    """Return from which capacity a last, partial block is found, and the tokens it lacks.

    It is the deepest block of its chain, so it hits where the whole chain does: requests find `found` blocks,
    all of them from a capacity of `whole` on.
    """
    lacking = np.maximum(read.prompt_blocks * read.block_size - read.prompt_tokens, 0)
    at = np.flatnonzero((found == read.prompt_blocks) & (lacking > 0))
    return whole[at], lacking[at]


def _capacities(values: Sequence[int]) -> Counts:
    if min(values, default=0) < 0:
        raise ConfigError(f"a capacity is at least 0 blocks, got {min(values)}")
    return np.array(values, np.int64)


def _check_count_from(count_from: int, num_requests: int) -> None:
    if not 0 <= count_from < max(num_requests, 1):
        raise ConfigError(
            f"count_from is {count_from}, and the trace has {num_requests} requests; hits are "
            "counted from one of them on, the first is 0"
        )
