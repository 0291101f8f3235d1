"""The cost gate: what it learns from noisy loads, and that a hit is never the slower choice."""

import math
from random import Random

import pytest

from quire.tiers.stack.gate import CostGate, Estimate
from turns import by_turns

MIB = 1 << 20
SIZE = MIB // 4


class GateTraffic:
    """Prompts of 1 to 512 blocks over a tier and a device whose true costs are known.

    Loads take what they truly cost, times noise of 30 %. A prompt of few tokens computes at
    `tokens_s`; attention adds a term that grows with the square of its length.
    """

    def __init__(self, seed, latency_s, bandwidth, tokens_s):
        self.random = Random(seed)
        self.latency_s, self.bandwidth, self.tokens_s = latency_s, bandwidth, tokens_s
        self.estimate = Estimate(0.5e-3, 800e6)
        self.gate = CostGate([self.estimate], limit_s=60.0)
        self.num_asked = self.num_loads = 0
        self.spent_s = self.best_s = 0.0
        self.worst = 0.0

    def recompute_s(self, num_blocks, whole):
        pairs = whole**2 - num_blocks**2
        return ((whole - num_blocks) * 16 + pairs * 16 / 4096) / self.tokens_s

    def load_s(self, num_blocks):
        return self.latency_s + num_blocks * SIZE / self.bandwidth if num_blocks else 0.0

    def observe(self, num_blocks):
        noise = math.exp(self.random.gauss(0, 0.3) - 0.3**2 / 2)
        self.estimate.observe(num_blocks * SIZE, self.load_s(num_blocks) * noise)

    def request(self):
        whole = int(2 ** self.random.uniform(0, 9))
        choice = self.gate.choose([0] * whole, [SIZE] * whole, lambda n: self.recompute_s(n, whole))
        self.num_asked += 1
        if choice.num_keys:
            self.num_loads += 1
            self.observe(choice.num_keys)
        elif self.num_asked % 10 == 0:
            self.observe(min(whole, self.random.choice([8, 32, 128])))
        cost_s = self.load_s(choice.num_keys) + self.recompute_s(choice.num_keys, whole)
        if self.estimate.num_observed > 60:
            self.worst = max(self.worst, cost_s / self.recompute_s(0, whole))
        if self.num_asked > 600:
            self.spent_s += cost_s
            self.best_s += min(self.recompute_s(0, whole), self.load_s(whole))
        return choice.num_keys


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("speed", "tokens_s", "latency_s"),
    by_turns([0.3, 0.9, 1.0, 1.1, 1.5, 4.0], [2e3, 2e4, 2e5], [1e-4, 5e-3]),
)
def test_a_hit_that_costs_over_a_tenth_more_than_recompute_is_never_chosen(
    speed, latency_s, tokens_s
):
    """`speed` is the tier's bandwidth, where 1.0 loads a block as fast as it is computed."""
    traffic = GateTraffic(round(speed * 10), latency_s, tokens_s / 16 * SIZE * speed, tokens_s)
    for _ in range(900):
        traffic.request()
    assert traffic.worst <= 1.10
    assert (
        traffic.spent_s <= 1.5 * traffic.best_s
    )  # caution costs most where latency hides the bandwidth


def test_a_tier_that_became_fast_is_used_again_after_a_few_probes():
    traffic = GateTraffic(1, 1e-3, 20e6, 2e4)
    for _ in range(300):
        traffic.request()
    loads_while_slow = traffic.num_loads
    traffic.bandwidth = 4e9
    used = [bool(traffic.request()) for _ in range(300)]
    assert loads_while_slow < 10
    assert True in used
    assert used.index(True) <= 150  # a probe every tenth request
    assert sum(used[150:]) >= 100


def test_a_tier_that_became_slow_is_left_within_a_few_loads():
    traffic = GateTraffic(2, 1e-3, 4e9, 2e4)
    for _ in range(200):
        traffic.request()
    assert traffic.num_loads > 150
    traffic.bandwidth, before = 20e6, traffic.num_loads
    for _ in range(200):
        traffic.request()
    assert traffic.num_loads - before <= 8


def test_an_outlier_changes_the_load_estimate_little():
    estimate = Estimate(1e-3, 1e9)
    for _ in range(40):
        estimate.observe(10 * MIB, 1e-3 + 10 * MIB / 1e9)
    before = estimate.seconds(10 * MIB)
    estimate.observe(10 * MIB, 30.0)
    assert estimate.seconds(10 * MIB) < 1.25 * before


def test_latency_and_bandwidth_are_told_apart():
    estimate, random = Estimate(1e-3, 1e9), Random(5)
    for _ in range(200):
        num_bytes = random.choice([1, 4, 16, 64]) * MIB
        estimate.observe(num_bytes, (0.02 + num_bytes / 300e6) * random.uniform(0.9, 1.1))
    assert estimate.latency_s == pytest.approx(0.02, rel=0.2)
    assert estimate.bandwidth == pytest.approx(300e6, rel=0.1)


def test_loads_of_one_size_are_taken_to_grow_in_proportion():
    estimate = Estimate(1e-3, 1e9)
    for _ in range(500):
        estimate.observe(MIB, 0.1)
    assert estimate.careful_seconds(100 * MIB) == pytest.approx(10.0, rel=0.25)
    assert estimate.careful_seconds(MIB) >= 0.099


def test_an_estimate_with_its_uncertainty_never_falls_below_the_estimate():
    estimate, random = Estimate(1e-3, 1e9), Random(6)
    for _ in range(300):
        num_bytes = random.randrange(1, 64 * MIB)
        estimate.observe(num_bytes, random.uniform(0, 1))
        for asked in (0, 1, MIB, 1 << 40):
            assert estimate.careful_seconds(asked) >= estimate.seconds(asked) >= 0


def test_only_the_unbroken_head_is_loaded():
    gate = CostGate([Estimate(1e-6, 1e12)], 10.0)
    assert gate.choose([0, 0, -1, 0], [100] * 4, lambda n: 4.0 - n).num_keys == 2
    assert gate.choose([-1, 0], [100] * 2, lambda n: 4.0 - n).num_keys == 0


def test_a_fast_head_is_loaded_and_a_slow_tail_computed():
    gate = CostGate([Estimate(1e-5, 1e10), Estimate(1.0, 1e6)], 60.0)
    choice = gate.choose([0] * 50 + [1] * 50, [MIB] * 100, lambda n: (100 - n) * 0.01)
    assert (choice.num_keys, choice.num_found, choice.refused) == (50, 100, (1,))


def test_an_answer_is_a_multiple_of_the_step():
    gate = CostGate([Estimate(1e-5, 1e10), Estimate(1.0, 1e6)], 60.0)
    found = [0] * 7 + [1] * 5
    assert gate.choose(found, [MIB] * 12, lambda n: (12 - n) * 0.01, step=3).num_keys == 6


def test_a_load_that_would_not_end_in_time_is_not_begun():
    gate = CostGate([Estimate(1e-3, 1e6)], limit_s=5.0)
    assert gate.choose([0] * 100, [MIB] * 100, lambda n: 1000.0 * (100 - n)).num_keys <= 5
