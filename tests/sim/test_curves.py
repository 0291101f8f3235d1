"""Hit-ratio curves: exact, against caches that are written out block by block."""

import random
import tracemalloc

import numpy as np
import pytest
from curves_help import SmallTrace, belady_hits, best_possible, growing, lru_hits, prompts, tails
from hypothesis import strategies as st

from quire.core.policies import policy_names
from quire.errors import ConfigError
from quire_sim import curves as curves_module
from quire_sim import optimum, reuse
from quire_sim.curves import curves, curves_of
from quire_sim.executors import Processes
from quire_sim.replay import replay
from quire_sim.trace.rows import TraceRequest
from quire_sim.workload import Chat, Traffic, Workload
from turns import drawn

tries = st.one_of(prompts, growing)


@drawn(50, 600, tries)
def test_lru_is_a_list_of_blocks_at_every_capacity(texts):
    trace = SmallTrace(texts)
    curve = curves(trace).lru
    for capacity in range(trace.num_unique + 2):
        found = trace.found_tokens(lru_hits(trace, capacity))
        assert curve.at(capacity) == found / sum(trace.tokens)


@drawn(50, 600, tries)
def test_the_optimum_keeps_what_is_used_again_soonest_at_every_capacity(texts):
    trace = SmallTrace(texts)
    curve = curves(trace).optimum
    for capacity in range(trace.num_unique + 2):
        found = trace.found_tokens(belady_hits(trace, capacity))
        assert curve.at(capacity) == found / sum(trace.tokens)


@drawn(15, 100, st.lists(st.text("ab", max_size=3), min_size=1, max_size=6), st.integers(0, 4))
def test_the_optimum_equals_the_best_choice_found_by_search(texts, capacity):
    trace = SmallTrace(texts)
    found = best_possible(trace, capacity)
    assert curves(trace).optimum.at(capacity) == found / sum(trace.tokens)


@drawn(20, 240, st.lists(st.text("ab", max_size=4), min_size=1, max_size=8), st.integers(0, 5))
def test_the_reachable_curve_equals_the_best_choice_found_by_search(texts, capacity):
    trace = SmallTrace(texts)
    found = best_possible(trace, capacity, bypass=False)
    assert curves(trace).reachable.at(capacity) == found / sum(trace.tokens)


@drawn(33, 400, st.data(), tries)
def test_last_blocks_that_are_partial_count_with_the_tokens_they_have(data, texts):
    lengths = [data.draw(tails) if text else 1 for text in texts]
    trace = SmallTrace(texts, tails=lengths)
    both = curves(trace)
    total = sum(trace.tokens)
    for capacity in range(trace.num_unique + 2):
        assert both.lru.at(capacity) == trace.found_tokens(lru_hits(trace, capacity)) / total
        best = trace.found_tokens(belady_hits(trace, capacity))
        assert both.optimum.at(capacity) >= best / total


@drawn(
    50,
    600,
    st.data(),
    st.lists(st.text("ab", max_size=4), min_size=1, max_size=7),
    st.integers(0, 5),
    st.integers(2, 9),
)
def test_bounds_hold_for_every_choice_of_kept_blocks(data, texts, capacity, size):
    lacking = [data.draw(st.integers(1 - size, 0)) if text else 1 for text in texts]
    trace = SmallTrace(texts, size, lacking)
    both, total = curves(trace), sum(trace.tokens)
    assert best_possible(trace, capacity) / total <= both.optimum.at(capacity) <= both.ceiling
    least = best_possible(trace, capacity, bypass=False) / total
    assert least <= both.reachable.at(capacity) <= both.ceiling
    for name in ("optimum", "reachable") if capacity else ():
        (result,) = optimum.optimum_results(trace, [capacity], name)
        assert result.token_hit == getattr(both, name).at(capacity)
        assert result.hit_tokens + sum(result.missed.values()) == result.prompt_tokens


@drawn(20, 240, st.data(), tries, st.integers(2, 9), st.sampled_from(policy_names()))
def test_bounds_hold_for_every_policy(data, texts, size, policy):
    lacking = [data.draw(st.integers(1 - size, 0)) if text else 1 for text in texts]
    trace = SmallTrace(texts, size, lacking)
    both = curves(trace)
    for capacity in (1, 2, 4, 7):
        found = replay(trace, capacity, policy).token_hit
        assert found <= both.reachable.at(capacity) <= both.optimum.at(capacity)


def test_a_bound_counts_tokens_where_a_partial_block_would_be_kept_for_a_whole_one():
    trace = SmallTrace(["a", "b", "a", "b"], 100, [-99, 0, -99, 0])
    assert trace.found_tokens(belady_hits(trace, 1)) == 1  # in blocks it is as good
    assert best_possible(trace, 1) == 100
    assert curves(trace).optimum.at(1) == (100 + 1) / sum(trace.tokens)


@drawn(20, 240, tries, st.data())
def test_requests_before_count_from_only_warm_the_cache_up(texts, data):
    trace = SmallTrace(texts)
    count_from = data.draw(st.integers(0, len(texts) - 1))
    both = curves(trace, count_from=count_from)
    total = sum(trace.tokens[count_from:])
    for capacity in range(trace.num_unique + 2):
        found = trace.found_tokens(lru_hits(trace, capacity), count_from)
        assert both.lru.at(capacity) == found / total
        found = trace.found_tokens(belady_hits(trace, capacity), count_from)
        assert both.optimum.at(capacity) == found / total


@drawn(20, 240, tries)
def test_lru_reachable_and_optimum_rise_to_one_ceiling_in_that_order(texts):
    trace = SmallTrace(texts)
    both = curves(trace)
    at = range(trace.num_unique + 1)
    three = (both.lru, both.reachable, both.optimum)
    lru, reachable, optimum = ([curve.at(c) for c in at] for curve in three)
    for curve in (lru, reachable, optimum):
        assert curve == sorted(curve)
        assert curve[-1] == both.ceiling
    for low, middle, high in zip(lru, reachable, optimum, strict=True):
        assert low <= middle <= high
    assert both.num_unique == trace.num_unique


def test_runs_may_be_cut_anywhere():
    class CutTrace(SmallTrace):
        def runs(self, chain):
            return np.array([[block, 1] for block in chain], np.int32).reshape(-1, 2)

    texts = ["abcdefgh", "abcx", "abcdefghij", "abcd", "abcdefg", "abcxy", "abcdefghij"]
    whole, cut = curves(SmallTrace(texts)), curves(CutTrace(texts))
    for capacity in range(whole.num_unique + 1):
        assert whole.lru.at(capacity) == cut.lru.at(capacity)
        assert whole.optimum.at(capacity) == cut.optimum.at(capacity)


@pytest.mark.parametrize("texts", [["abc"], ["", "", ""], [""]], ids=["one", "empty", "one empty"])
def test_a_trace_without_reuse_hits_nothing(texts):
    both = curves(SmallTrace(texts))
    assert both.ceiling == both.lru.at(0) == both.optimum.at(10**9) == 0.0
    assert both.lru.tiers([1, 2]) == [0.0, 0.0]
    assert both.optimum.capacity_for(0.9) == 0


def test_capacity_zero_has_no_hits_and_a_small_one_keeps_the_first_blocks():
    both = curves(SmallTrace(["abcdefgh"] * 4))
    for curve in (both.lru, both.reachable, both.optimum):
        assert [curve.at(c) for c in (0, 1, 3, 8, 99)] == [0, 3 / 32, 9 / 32, 24 / 32, 24 / 32]


def test_a_trace_of_no_requests_has_flat_curves():
    both = curves(SmallTrace([]))
    assert (both.num_requests, both.num_unique, both.lru.at(5)) == (0, 0, 0.0)


def test_tiers_share_the_hits_by_their_own_capacities():
    curve = curves(SmallTrace(["abcd", "wxyz"] * 5)).lru
    device, host, disk = curve.tiers([3, 4, 100])
    assert device == curve.at(3)
    assert host == pytest.approx(curve.at(7) - curve.at(3))
    assert device + host + disk == pytest.approx(curve.ceiling)


def test_the_capacity_for_a_share_of_the_ceiling_is_the_smallest():
    texts = ["ab" * (i % 7) + "c" * (i % 11) for i in range(80)]
    both = curves(SmallTrace(texts))
    for curve in (both.lru, both.optimum):
        for share in (0.1, 0.5, 0.9, 1.0):
            capacity = curve.capacity_for(share)
            assert curve.at(capacity) >= share * curve.ceiling * (1 - 1e-12)
            assert curve.at(capacity - 1) < share * curve.ceiling


def test_thinning_keeps_values_exact_where_they_are_kept():
    texts = ["ab" * (i % 17) + "cd" * (i % 29) for i in range(300)]
    curve = curves(SmallTrace(texts)).lru
    thin = curve.thinned(12, keep=[17, 40])
    assert len(thin.capacities) <= 14
    assert {0, 17, 40, int(curve.capacities[-1])} <= set(thin.capacities.tolist())
    for capacity, ratio in zip(thin.capacities.tolist(), thin.token_hit.tolist(), strict=True):
        assert ratio == curve.at(capacity) == thin.at(capacity)


def test_a_bad_argument_of_curves_is_refused_with_what_is_allowed():
    trace = SmallTrace(["ab", "ab"])
    with pytest.raises(ConfigError, match="2 requests"):
        curves(trace, count_from=2)
    curve = curves(trace).lru
    for call in (lambda: curve.at(-1), lambda: curve.tiers([5, -2])):
        with pytest.raises(ConfigError, match="at least 0 blocks"):
            call()
    with pytest.raises(ConfigError, match="between 0 and 1"):
        curve.capacity_for(1.5)
    with pytest.raises(ConfigError, match="2 points"):
        curve.thinned(1)


def test_memory_grows_with_different_blocks_and_not_with_references():
    from quire_sim.reuse import reuses

    class Long:
        source, format, block_size = "a test", "made", 16

        def __iter__(self):
            runs = np.array([[0, 1_000_000]], np.int32)
            return (TraceRequest(i + 1, float(i), 16_000_000, 0, runs) for i in range(1000))

    read = reuses(Long(), Long.block_size)
    assert len(read.earlier) == 999
    assert read.num_unique == 1_000_000
    assert curves(Long()).lru.at(500_000) == pytest.approx(0.4995)


def test_steps_that_are_added_up_a_few_at_a_time_give_the_same_curves(monkeypatch):
    trace = Workload({"chat": Traffic(Chat())}, 400, seed=1)
    whole = curves(trace, count_from=100)
    for module in (optimum, reuse):
        monkeypatch.setattr(module, "STEPS_AT_ONCE", 7)
    parts = curves(trace, count_from=100)
    for name in ("lru", "optimum", "reachable"):
        expected, got = getattr(whole, name), getattr(parts, name)
        assert got.capacities.tolist() == expected.capacities.tolist()
        assert got.hit_tokens.tolist() == expected.hit_tokens.tolist()


def test_curves_that_are_computed_at_a_time_are_the_same(monkeypatch):
    monkeypatch.setattr(curves_module, "MANY_REQUESTS", 400)
    read = reuse.reuses(Workload({"chat": Traffic(Chat())}, 400, seed=1), 16)
    one, some = curves_of(read, count_from=9), curves_of(read, count_from=9, executor=Processes(2))
    for name in ("lru", "optimum", "reachable"):
        expected, got = getattr(one, name), getattr(some, name)
        assert got.capacities.tolist() == expected.capacities.tolist()
        assert got.hit_tokens.tolist() == expected.hit_tokens.tolist()
    assert some.seconds > 0


def test_requests_that_are_read_a_few_at_a_time_give_the_same_reuses(monkeypatch):
    draw = random.Random(1)
    texts = [draw.choice("ab") * draw.randint(0, 9) + draw.choice("ab") for _ in range(400)]
    whole = reuse.reuses(SmallTrace(texts), 4)
    for at_once in (1, 2, 7):
        monkeypatch.setattr(reuse, "REQUESTS_AT_ONCE", at_once)
        parts = reuse.reuses(SmallTrace(texts), 4)
        for name in ("earlier", "later", "num_blocks", "prompt_blocks", "prompt_tokens"):
            assert getattr(parts, name).tolist() == getattr(whole, name).tolist()


def test_a_request_costs_the_numbers_of_its_reuses_and_no_objects():
    requests = list(Workload({"chat": Traffic(Chat())}, 20_000, seed=1))
    few, many = (peak_of_reuses(requests[:count]) for count in (4_000, 20_000))
    assert many - few < 150 * 16_000


def peak_of_reuses(requests):
    tracemalloc.start()
    try:
        reuse.reuses(requests, 16)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
