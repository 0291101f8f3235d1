"""Hints that carry time on the public traces: the share of what is between LRU and reachable that `learned` finds by them.

`QUIRE_FULL=1` adds the coding agents' trace.
"""

import os

import pytest

from quire.sim.curves import curves
from quire.sim.replay import replay
from traces import AGENT, CODING_AGENT, CONVERSATION

FULL = bool(os.environ.get("QUIRE_FULL"))

BARS = [
    (CONVERSATION, 1, "return-time:2", 0.80),
    (CONVERSATION, 5, "return-time:2", 0.90),
    (CONVERSATION, 10, "return-time:2", 0.90),
    (CODING_AGENT, 1, "return-time:2", 0.65),
    (CODING_AGENT, 1, "return-time:4", 0.45),
]
"""Trace, capacity in % of all blocks, what is foretold, the least share of the gap."""

MISLED = ["return-time-wrong", "return-time-blind:2", "return-time-blind:4"]

CELLS = [(CONVERSATION, 1), (CONVERSATION, 5), (CONVERSATION, 10), (AGENT, 1), (AGENT, 5)]
CELLS += [(AGENT, 10), (CODING_AGENT, 1), (CODING_AGENT, 5)]


def wanted(rows):
    return [row for row in rows if FULL or row[0] != CODING_AGENT]


def hits(trace, share, hints):
    """Return token hits, 0 to 1: of LRU without hints, of `learned` with them, and what is reachable."""
    capacity, both = trace.num_unique * share // 100, curves(trace)
    told = replay(trace, capacity, "learned", hints=hints).token_hit
    return both.lru.at(capacity), told, both.reachable.at(capacity)


@pytest.mark.parametrize(("name", "share", "hints", "bar"), wanted(BARS))
def test_times_close_most_of_the_gap(kept, name, share, hints, bar):
    lru, told, best = hits(kept(name), share, hints)
    assert (told - lru) / (best - lru) >= bar


@pytest.mark.parametrize("hints", MISLED)
@pytest.mark.parametrize(("name", "share"), wanted(CELLS))
def test_times_that_mislead_cost_half_a_point_at_most(kept, name, share, hints):
    lru, told, _ = hits(kept(name), share, hints)
    assert told >= lru - 0.005
