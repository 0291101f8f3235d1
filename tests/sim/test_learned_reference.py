"""The policy `learned` on the public traces: how much of the gap between LRU and the optimum it closes.

Hits are token hits in % of all prompt tokens, whole trace, from a cold start. Those of LRU and of the
optimum are published ones, which other tests reproduce. By default some of the narrowest cells are
replayed; the long run has all, and the coding agents' trace.
"""

import pytest

from quire_sim.replay import replay
from traces import AGENT, CODING_AGENT, CONVERSATION
from turns import few, few_rows

LRU = {
    CONVERSATION: {1: 5.35, 5: 19.96, 10: 28.44, 25: 36.04, 50: 37.03},
    AGENT: {1: 41.86, 5: 80.91, 10: 88.77, 25: 89.72, 50: 89.73},
    CODING_AGENT: {1: 79.78, 5: 95.86, 10: 96.22, 25: 96.30},
}
OPTIMUM = {CONVERSATION: {5: 37.36, 10: 37.36}}

CLOSED = 0.20
"""The share of the gap that is closed without hints."""

CLOSED_BY_HINTS = 0.80
"""The share that is closed where callers say when a session is over."""

ALWAYS = [(AGENT, share) for share in (1, 5, 10, 25)]


def hit(trace, share, policy, hints="none"):
    """Return the token hit in %."""
    capacity = trace.num_unique * share // 100
    return 100 * replay(trace, capacity, policy, hints=hints).token_hit


def closed(name, share, found):
    """Return the share of the gap between LRU and the optimum that is closed."""
    lru, optimum = LRU[name][share], OPTIMUM[name][share]
    return (found - lru) / (optimum - lru)


@pytest.mark.ci
@pytest.mark.parametrize("share", few([5, 10], 10))
def test_learned_without_hints_closes_a_fifth_of_the_gap_to_the_optimum(kept, share):
    found = hit(kept(CONVERSATION), share, "learned")
    assert closed(CONVERSATION, share, found) >= CLOSED


@pytest.mark.ci
@pytest.mark.parametrize(
    ("share", "policy"),
    few_rows(
        [(5, "learned"), (5, "lru"), (10, "learned"), (10, "lru")], (5, "learned"), (10, "lru")
    ),
)
def test_learned_with_session_ends_closes_four_fifths_of_the_gap_to_the_optimum(
    kept, share, policy
):
    found = hit(kept(CONVERSATION), share, policy, "session-end")
    assert closed(CONVERSATION, share, found) >= CLOSED_BY_HINTS


@pytest.mark.ci
def test_learned_recovers_the_hits_that_leaving_lru_costs_at_first(kept):
    assert hit(kept(CONVERSATION), 3, "learned") > 12.81 + 5


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("name", "share"), few_rows([(name, share) for name in LRU for share in LRU[name]], *ALWAYS)
)
def test_nowhere_is_a_point_lost_to_lru(kept, name, share):
    assert hit(kept(name), share, "learned") > LRU[name][share] - 1
