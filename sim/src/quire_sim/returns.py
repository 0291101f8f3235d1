"""Forecasts of return made from a trace: the time until each request is continued, with noise.

A forecast is the time to the next use of the first block that a request stored. If no request uses that again, the
forecast is "never", and the time is that to the next use of the last block that it found. Each time is multiplied
with a factor of its own, drawn log-uniformly between 1 / noise and noise. The same trace gives the same draws.
"""

from __future__ import annotations

import msgspec
import numpy as np

from quire.config import MAX_SECONDS
from quire.core import Hint
from quire_sim.reuse import Bools, Counts, Floats, Reuses, reuses
from quire_sim.trace.rows import Trace

OFF_BY = 10.0
"""A wrong forecast is so many times too long or too short, and claims to be right within `CLAIMED`."""

CLAIMED = 2.0

SOONEST_S = 1e-3
"""What is gone on from in the same moment has a forecast of so many seconds."""


class Returns(msgspec.Struct, frozen=True, eq=False):
    """The next use of each request's blocks by another request, [requests] each.

    `seconds`  to that use, float64; infinite where there is none
    `spent`    whether no request uses again what the request stored, bool
    """

    seconds: Floats
    spent: Bools


def returns_of(read: Reuses) -> Returns:
    """Return the next use of the first block that each request stored, or of the last one that it found."""
    found = read.seen_blocks
    spent = found < read.prompt_blocks
    uses = _next_use(read, found)
    spent &= uses < 0
    uses = np.where(uses < 0, _next_use(read, found - 1), uses)
    seconds = np.append(read.came_s, np.inf)[uses] - read.came_s
    return Returns(np.maximum(seconds, SOONEST_S), spent)


def returns(trace: Trace, noise: float) -> list[Hint]:
    """Return forecasts that are right within a factor of `noise`."""
    there = returns_of(reuses(trace, trace.block_size))
    return _hints(there, there.seconds * noise ** _draws(there), noise)


def wrong_returns(trace: Trace, noise: float) -> list[Hint]:
    """Return forecasts of which each is `OFF_BY` times too long or too short."""
    there = returns_of(reuses(trace, trace.block_size))
    draws = _draws(there)
    off_by = np.where(draws > 0, OFF_BY, 1 / OFF_BY)
    return _hints(there, there.seconds * noise**draws * off_by, CLAIMED)


def blind_returns(trace: Trace, noise: float) -> list[Hint]:
    """Return the forecasts of `returns`; where nobody returns, one of those that are said of others."""
    there = returns_of(reuses(trace, trace.block_size))
    draws = _draws(there)
    known = np.append(there.seconds[np.isfinite(there.seconds)], 1.0)
    drawn = known[((draws + 1) / 2 * (len(known) - 1)).astype(np.int64)]
    gone = there.spent | np.isinf(there.seconds)
    said = np.where(gone, drawn, there.seconds) * noise ** np.roll(draws, 1)
    return _hints(Returns(there.seconds, np.zeros_like(gone)), said, noise)


def _next_use(read: Reuses, depth: Counts) -> Counts:
    """Return the request that uses block number `depth` of each request next, int64 [requests]; -1: none does."""
    order = np.argsort(read.earlier, kind="stable")
    ends = np.concatenate(([0], read.num_blocks[order].cumsum()))
    first = np.searchsorted(read.earlier[order], np.arange(read.num_requests + 1))
    at = np.searchsorted(ends, ends[first[:-1]] + depth, side="right") - 1
    is_used = (at < first[1:]) & (depth >= 0) & (depth < read.prompt_blocks)
    return np.append(read.later[order], -1)[np.where(is_used, at, -1)]


def _draws(there: Returns) -> Floats:
    """Return numbers between -1 and 1, float64 [requests]."""
    count = len(there.seconds)
    return np.random.default_rng(count).uniform(-1, 1, count)


def _hints(there: Returns, said: Floats, within: float) -> list[Hint]:
    """Return what is said: of what is spent, "never"; no time that is infinite."""
    times = np.clip(said, SOONEST_S, MAX_SECONDS).tolist()
    rows = zip(times, np.isfinite(said).tolist(), there.spent.tolist(), strict=True)
    return [
        Hint("never" if spent else "unknown", returns_in_s=s if there else None, within=within)
        for s, there, spent in rows
    ]
