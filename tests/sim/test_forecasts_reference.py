"""Hints that carry time on the public traces: the share of what is between LRU and reachable that `learned` finds by them.

By default one cell of the conversations and all of the agents' are replayed; the long run has all, and the coding agents'.
"""

import functools

import pytest

from quire_sim.curves import curves
from quire_sim.replay import replay
from traces import AGENT, CODING_AGENT, CONVERSATION
from turns import few_rows

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


@pytest.fixture(scope="module")
def found(kept):
    """Return token hits, 0 to 1: of LRU without hints, of `learned` with them, and what is reachable."""
    bounds = functools.cache(lambda name: curves(kept(name)))

    def hits(name, share, hints):
        trace, both = kept(name), bounds(name)
        capacity = trace.num_unique * share // 100
        told = replay(trace, capacity, "learned", hints=hints).token_hit
        return both.lru.at(capacity), told, both.reachable.at(capacity)

    return hits


@pytest.mark.ci
@pytest.mark.parametrize(("name", "share", "hints", "bar"), few_rows(BARS, BARS[1]))
def test_times_close_most_of_the_gap(found, name, share, hints, bar):
    lru, told, best = found(name, share, hints)
    assert (told - lru) / (best - lru) >= bar


ALWAYS = [(AGENT, share, hints) for share in (1, 5, 10) for hints in MISLED]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "share", "hints"), few_rows([(*c, hints) for c in CELLS for hints in MISLED], *ALWAYS)
)
def test_times_that_mislead_cost_half_a_point_at_most(found, name, share, hints):
    lru, told, _ = found(name, share, hints)
    assert told >= lru - 0.005
