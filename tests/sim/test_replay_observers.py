"""Observers of a replay."""

import pytest
from replay_help import BLOCK, random_chains, trace_of

from quire_sim.observers import HitsOverTime, SharedPrefixes
from quire_sim.replay import replay
from quire_sim.reuse import reuses


def observed(observer, trace, capacity=1000):
    """Return the observer after a replay, and the result."""
    return observer, replay(trace, capacity, observers=[observer])


# -- over time -----------------------------------------------------------------------------


def test_requests_fall_into_the_stretch_of_time_in_which_they_arrive():
    trace = trace_of([[1], [1], [1], [2]], time_s=[0.0, 0.9, 1.0, 3.5])
    seen, _ = observed(HitsOverTime(max_buckets=4), trace)
    assert [each.num_requests for each in seen.buckets] == [2, 1, 0, 1]
    assert [each.token_hit for each in seen.buckets] == [0.4, 0.8, None, 0.0]
    assert [(each.start_s, each.stop_s) for each in seen.buckets][2] == (2.0, 3.0)


@pytest.mark.parametrize("seconds", [0.01, 1.0, 17.0, 100_000.0])
def test_stretches_grow_with_the_trace_and_keep_every_token(seconds):
    chains = random_chains(1)
    trace = trace_of(chains, time_s=[number * seconds for number in range(len(chains))])
    seen, result = observed(HitsOverTime(max_buckets=8), trace)
    assert 1 <= len(seen.buckets) <= 8
    assert sum(each.num_requests for each in seen.buckets) == result.num_requests
    assert sum(each.prompt_tokens for each in seen.buckets) == result.prompt_tokens
    assert sum(each.hit_tokens for each in seen.buckets) == result.hit_tokens
    for each in seen.buckets:
        arrived = [r for r in trace if each.start_s <= r.time_s < each.stop_s]
        assert each.num_requests == len(arrived)


# -- shared prefixes -----------------------------------------------------------------------


def test_blocks_always_found_together_are_one_stretch():
    trace = trace_of([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 7], [1, 2, 7]])
    seen, _ = observed(SharedPrefixes(BLOCK), trace)
    stretches = [(each.row, each.start, each.stop, each.num_hits) for each in seen.top()]
    assert stretches == [(1, 0, 8, 3), (1, 8, 16, 1), (3, 8, 12, 1)]
    assert [each.hit_tokens for each in seen.top(1)] == [24]


@pytest.mark.cases(5)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [3, 10, 1000])
def test_stretches_share_out_all_tokens_found(seed, capacity):
    trace = trace_of(random_chains(seed, num_requests=150))
    seen, result = observed(SharedPrefixes(BLOCK), trace, capacity)
    top = seen.top(10_000)
    assert sum(each.hit_tokens for each in top) == result.hit_tokens
    assert [each.hit_tokens for each in top] == sorted((e.hit_tokens for e in top), reverse=True)
    for each in top:
        chain = trace.requests[each.row - 1].blocks
        assert 0 <= each.start < each.stop <= len(chain) * BLOCK


def test_nothing_found_means_no_stretch():
    assert observed(SharedPrefixes(BLOCK), trace_of([[1], [2], []]))[0].top() == []


# -- reuse ---------------------------------------------------------------------------------


def test_the_time_since_the_last_use_is_counted_in_bins_that_double():
    trace = trace_of([[1], [1], [1, 2], [1, 2], [1]], time_s=[0.0, 0.5, 1.5, 4.5, 64.5])
    read = reuses(trace, BLOCK)
    assert read.num_unique == 2
    assert read.blocks_by_gap()[:8] == [1, 1, 2, 0, 0, 0, 1, 0]


def test_every_use_of_a_block_is_a_first_or_a_later_one():
    trace = trace_of(random_chains(2))
    read = reuses(trace, BLOCK)
    assert read.num_unique + sum(read.blocks_by_gap()) == replay(trace, 4).prompt_blocks
