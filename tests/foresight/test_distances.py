"""From notes of requests to LRU distances: against a list of blocks that is kept in order by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.foresight.distances import hit_curve, lru_distances, uses_of

FORKS = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, 6), st.integers(0, 4)), max_size=40
)
"""Requests: which one before is gone on with, what of its end is left out, how much is new."""


def chains_of(forks):
    """Prompts that are beginnings of others and go on differently; blocks by name."""
    chains, named = [], 0
    for before, left_out, new in forks:
        chain = chains[before % len(chains)] if chains and before % 5 else []
        kept = chain[: max(len(chain) - left_out, 0)]
        chains.append([*kept, *range(named, named + new)])
        named += new
    return chains


def noted(chains, forgotten=0):
    """The notes of each chain: size, shared blocks, and the last request that used all of these."""
    last, notes = {}, []
    for number, chain in enumerate(chains, 1 - forgotten):
        shared = [block for block in chain if block in last]
        notes.append((len(chain), len(shared), last[shared[-1]] if shared else 0))
        last.update(dict.fromkeys(chain, number))
    return notes[forgotten:]


def uses_by_hand(chains):
    last, uses = {}, []
    for number, chain in enumerate(chains, 1):
        for block in chain:
            if block in last:
                if uses and uses[-1][:2] == [last[block], number]:
                    uses[-1][2] += 1
                else:
                    uses.append([last[block], number, 1])
        last.update(dict.fromkeys(chain, number))
    return uses


def distances_by_hand(chains):
    """For each block that comes again: how many blocks an LRU cache had to hold to find it."""
    stack, found = [], []
    for chain in chains:
        found += [stack.index(block) + 1 for block in chain if block in stack]
        stack = chain + [block for block in stack if block not in chain]
    return sorted(found)


def columns(notes):
    return np.array(notes, np.int64).reshape(-1, 3).T


@given(FORKS)
@settings(max_examples=100)
def test_uses_and_distances_are_those_of_a_cache_kept_by_hand(forks):
    chains = chains_of(forks)
    uses = uses_of(*columns(noted(chains)), 0)
    by_hand = uses_by_hand(chains)
    assert list(zip(uses.earlier, uses.later, uses.width, strict=True)) == list(map(tuple, by_hand))
    assert uses.touched.tolist() == [0, *map(len, chains)]
    below = lru_distances(uses.earlier, uses.later, uses.width, uses.touched)
    each = [d + k for d, width in zip(below, uses.width, strict=True) for k in range(1, width + 1)]
    assert sorted(each) == distances_by_hand(chains)


@given(FORKS)
def test_the_curve_rises_to_all_that_was_used_again(forks):
    chains = chains_of(forks)
    capacities, found = hit_curve(uses_of(*columns(noted(chains)), 0), 0)
    assert capacities[0] == found[0] == 0
    assert np.all(np.diff(capacities) > 0)
    assert np.all(np.diff(found) >= 0)
    assert found[-1] == sum(width for *_, width in uses_by_hand(chains))


@given(FORKS, st.integers(0, 10))
def test_uses_from_before_the_first_request_lack_only_their_place(forks, forgotten):
    chains = chains_of(forks)
    forgotten = min(forgotten, len(chains))
    uses = uses_of(*columns(noted(chains, forgotten)), 0)
    again = [shared for _, shared, _ in noted(chains, forgotten)]
    assert uses.width.sum() == sum(again)
    assert np.all(uses.earlier < uses.later)
    assert hit_curve(uses, 0)[1][-1] == pytest.approx(sum(again))


def test_reused_tokens_beyond_the_earlier_prompt_count_as_generated():
    uses = uses_of(*columns([(10, 0, 0), (40, 25, 1), (50, 40, 2)]), 15 + 60)
    assert list(zip(uses.earlier, uses.later, uses.width, strict=True)) == [(1, 2, 25), (2, 3, 40)]
    assert uses.touched.tolist() == [0, 10 + 15 + 20, 40 + 20, 50 + 20]


def test_requests_that_only_warm_up_are_not_counted():
    notes = [(10, 0, 0), (10, 10, 1), (10, 10, 2)]
    for first, found in ((0, 20), (1, 20), (2, 10), (3, 0)):
        assert hit_curve(uses_of(*columns(notes), 0), first)[1][-1] == found


def test_a_shared_prompt_is_followed_in_little_time_however_often_it_was_used():
    num = 60_000
    first = np.arange(num) == 0
    uses = uses_of(np.full(num, 20), np.where(first, 0, 10), np.maximum(np.arange(num), 0), 0)
    assert uses.width.tolist() == [10] * (num - 1)
    again = np.where(first, 0, 10)
    again[-100:] = 20
    since = np.arange(num)
    since[-100:] = np.arange(1, 101)
    uses = uses_of(np.full(num, 20), again, since, 0)
    assert uses.width.sum() == 10 * (num - 1) + 100 * 10
