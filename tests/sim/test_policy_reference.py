"""Policies on the public traces: hit ratios through the real manager against published ones.

The reference counts every id of a prompt as a block, the last, partial one too, and evicts
single blocks, leaves first; the capacity is a share of all ids, rounded down. By default a few cells
of the table are replayed; the long run replays all of them.
"""

import copy

import pytest

from quire.core.policies import policy_names
from quire_sim.replay import replay
from traces import AGENT, CONVERSATION
from turns import few_rows

SHARES = (1, 5, 10, 25, 50)

CONVERSATION_HITS = {
    "lru": (5.35, 19.96, 28.44, 36.04, 37.03),
    "fifo": (5.35, 19.96, 28.42, 36.03, 37.02),
    "lfu": (5.63, 21.13, 29.36, 36.06, 37.03),
}
AGENT_HITS = {
    "lru": (41.86, 80.91, 88.77, 89.72),
    "fifo": (41.88, 80.47, 88.49, 89.72),
}
DIGITS = {"lru": 0.005, "fifo": 0.005}
"""Points within which a policy meets its reference; 1 for those not named here."""

CELLS = [
    (name, policy, share, hit)
    for name, table in ((CONVERSATION, CONVERSATION_HITS), (AGENT, AGENT_HITS))
    for policy, hits in table.items()
    for share, hit in zip(SHARES, hits, strict=False)
]
ALWAYS = [
    each
    for each in CELLS
    if each[:3] == (CONVERSATION, "lfu", 10) or (each[0], each[2]) in {(AGENT, 1), (AGENT, 10)}
]


@pytest.mark.ci
@pytest.mark.parametrize(("name", "policy", "share", "published"), few_rows(CELLS, *ALWAYS))
def test_a_policy_finds_as_much_as_published(kept, name, policy, share, published):
    trace = kept(name)
    result = replay(trace, trace.num_unique * share // 100, policy)
    assert 100 * result.token_hit == pytest.approx(published, abs=DIGITS.get(policy, 1.0) + 1e-9)


@pytest.mark.ci
def test_the_price_of_a_policy_is_bounded(kept):
    trace = copy.copy(kept(AGENT))
    trace._requests = trace._requests[: len(trace._requests) // 3]

    def price(policy):
        """Times LRU's: the best of three rounds in turn, so that both meet the machine in the same moods."""
        rounds = [[replay(trace, 2475, each).seconds for each in (policy, "lru")] for _ in range(3)]
        seconds, of_lru = map(min, zip(*rounds, strict=True))
        return seconds / of_lru

    prices = {policy: price(policy) for policy in policy_names()}
    assert max(prices.values()) < 4, prices
