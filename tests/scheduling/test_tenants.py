"""Fairness among tenants and priorities, in virtual time: what others ask costs a tenant no more than their shares.

A step is a unit of time. A tenant's latencies are held against a schedule of its own that has its part of all limits.
"""

from itertools import chain
from random import Random
from statistics import median

import numpy as np
import pytest
from hypothesis import strategies as st
from scheduling_clock import BLOCK, Clockwork

from quire.scheduling.fairness import divided
from turns import drawn

SLACK = 3
"""Steps beside twice the time: for the step under way, and for what cannot be divided."""

LIVES = 5
"""Schedules of one setting. The median is of all: a dozen requests have two kinds of latencies, which one may tip."""


def lone_latencies(asked, slots, tokens, num_blocks, **limits):
    """Return the latencies of (time, length, max_tokens, num_twins) in a schedule of their own."""
    alone, jobs, left = Clockwork(slots, tokens, num_blocks, **limits), [], [*asked]
    while left or len(alone.scheduler):
        while left and left[0][0] <= alone.now:
            jobs.append(alone.ask("observed", *left.pop(0)[1:]))
        alone.step()
    return [alone.latencies[job] for job in jobs]


class Crowd:
    """Tenants who ask for what they like, beside one whose latencies are observed."""

    def __init__(self, random, num_tenants, slots, tokens, room, **limits):
        self.random, self.share = random, (slots // num_tenants, tokens // num_tenants)
        self.num_blocks = room * num_tenants
        self.all = Clockwork(slots, tokens, self.num_blocks, **limits)
        self.others = [f"other {at}" for at in range(1, num_tenants)]
        self.asked, self.jobs = [], []
        self.longest = room * BLOCK - 1

    def live(self, steps):
        pick = self.random.choice
        rate, crowd = pick([0.05, 0.2]), pick([0.05, 0.3, 1.0])
        size, most = pick([3, 20, self.longest // 2]), pick([1, 4, 20])
        for _ in range(steps):
            for other in self.others:
                if self.random.random() < crowd and len(self.all.scheduler) < 60:
                    self.bother(other)
            if self.random.random() < rate:
                num_twins = pick([0, 0, 0, 2])
                self.observe(self.random.randint(1, size), self.random.randint(1, most), num_twins)
            self.all.step()
        while len(self.all.scheduler):
            self.all.step()

    def bother(self, other):
        pick = self.random.choice
        max_tokens = pick([1, 5, 40])
        length = pick([1, 5, 50, self.longest * len(self.others)])
        length = max(1, min(length, self.num_blocks * BLOCK - max_tokens))
        num_twins = pick([0, 0, 0, 3, 15])
        self.all.ask(other, length, max_tokens, num_twins, priority=pick([0, 0, -1]))

    def observe(self, length, max_tokens, num_twins):
        length = max(1, min(length, self.longest - max_tokens))
        self.asked.append((self.all.now, length, max_tokens, num_twins))
        self.jobs.append(self.all.ask("observed", length, max_tokens, num_twins))


def slowdowns(seed, num_tenants, slots, tokens, room, **limits):
    """Return the latencies of observed requests, those alone, and what was asked."""
    whole = slots * num_tenants, tokens * num_tenants
    crowd = Crowd(Random(seed), num_tenants, *whole, room, **limits)
    crowd.live(60)
    alone = lone_latencies(crowd.asked, *crowd.share, room, **limits)
    return [crowd.all.latencies[job] for job in crowd.jobs], alone, crowd.asked


@drawn(
    3,
    2_000,
    seed=st.integers(0, 2**32),
    num_tenants=st.integers(2, 4),
    slots=st.integers(1, 6),
    tokens=st.integers(2, 30),
    room=st.integers(12, 40),
    most=st.sampled_from([None, None, 1, 7]),
    max_passed=st.sampled_from([1, 4, 16]),
)
def test_what_others_ask_at_most_doubles_the_time_that_a_share_of_the_schedule_takes(
    *, seed, num_tenants, slots, tokens, room, most, max_passed
):
    limits = {"max_prefill_tokens": most, "max_passed": max_passed}
    lives = [
        slowdowns(seed + number, num_tenants, slots, tokens + slots, room, **limits)
        for number in range(LIVES)
    ]
    lives = [life for life in lives if life[2]]
    for took, alone, asked in lives:
        assert sum(took) <= 2 * sum(alone) + SLACK * len(asked), asked
    if lives:
        took, alone, asked = ([*chain(*part)] for part in zip(*lives, strict=True))
        assert median(took) <= 2 * median(alone) + SLACK, asked


@pytest.mark.parametrize(
    ("share", "limits"),
    [
        ((1191, 2, 4, 6, 15), {"max_passed": 4}),
        ((540392677, 3, 1, 13, 26), {"max_prefill_tokens": 7, "max_passed": 1}),
    ],
)
def test_a_preempted_job_takes_blocks_back_from_a_tenant_with_twice_as_many_tokens(share, limits):
    took, alone, _ = slowdowns(*share, **limits)
    assert median(took) <= 2 * median(alone) + SLACK


def test_one_request_of_many_answers_holds_up_no_other_tenant():
    many = Clockwork(8, 64, 400)
    many.ask("greedy", 20, 100, num_twins=127)
    for _ in range(3):
        many.step()
    short = many.ask("short", 20, 2)
    for _ in range(3):
        many.step()
    assert many.latencies[short] <= 3


def test_a_step_is_divided_among_tenants_by_what_they_decode_and_compute():
    clock = Clockwork(8, 40, 400)
    first, second = clock.ask("a", 100, 2), clock.ask("b", 100, 2)
    other = clock.ask("b", 90, 2)
    step = clock.scheduler.plan()
    assert {job: int(n) for job, n in zip(step.jobs, step.lengths, strict=True)} == {
        first: 20,
        other: 20,
    }
    assert second.num_computed == 0


def test_a_tenant_without_prompts_leaves_its_part_of_a_step_to_the_others():
    clock = Clockwork(8, 40, 400)
    clock.ask("a", 4, 50)
    clock.step()
    long = clock.ask("b", 100, 2)
    assert clock.scheduler.plan().lengths.tolist() == [1, 39]
    clock.step()
    assert long.num_computed == 39


def test_a_waiting_job_takes_the_place_of_a_running_one_of_lower_priority():
    clock = Clockwork(2, 40, 100)
    low = [clock.ask(None, 4, 30, priority=-1) for _ in range(2)]
    clock.step()
    high = clock.ask(None, 4, 3)
    clock.step()
    assert [job.state for job in (*low, high)] == ["running", "waiting", "running"]
    assert (low[1].num_preempted, low[1].num_yielded) == (1, 1)
    while len(clock.scheduler):
        clock.step()
    assert clock.latencies[high] == 3


def test_equal_ones_of_one_tenant_and_higher_ones_yield_to_nobody():
    clock = Clockwork(2, 40, 100)
    running = [clock.ask(None, 4, 30, priority=priority) for priority in (0, 1)]
    clock.step()
    waits = clock.ask(None, 4, 1)
    clock.step()
    assert waits.state == "waiting"
    assert [job.num_preempted for job in running] == [0, 0]


def test_a_job_of_higher_priority_gets_blocks_that_lower_ones_hold():
    clock = Clockwork(8, 80, 20)
    low = [clock.ask(None, 30, 4, priority=-1) for _ in range(2)]
    clock.step()
    high = clock.ask(None, 40, 4)
    clock.step()
    assert high.state == "running"
    assert sum(job.num_yielded for job in low) == 1
    while len(clock.scheduler):
        clock.step()


def test_nobody_is_preempted_for_a_job_that_would_find_no_room_all_the_same():
    clock = Clockwork(8, 80, 20)
    pin = clock.manager.open(np.full(40, 7, np.int32))
    clock.manager.reserve(pin, 40)
    low = clock.ask(None, 20, 4, priority=-1)
    clock.step()
    high = clock.ask(None, 60, 4)
    clock.step()
    assert (low.num_yielded, high.state) == (0, "waiting")
    clock.manager.close(pin)
    while len(clock.scheduler):
        clock.step()


def test_a_job_that_yields_again_and_again_stays_away_twice_as_long_each_time():
    clock = Clockwork(2, 40, 1000)
    low = [clock.ask(None, 4, 400, priority=-1) for _ in range(2)]
    for _ in range(300):
        clock.step()
        clock.ask(None, 4, 1)
    yielded = sum(job.num_yielded for job in low)
    assert 0 < yielded <= 2 * clock.scheduler.limits.max_passed
    while len(clock.scheduler):
        clock.step()


def test_an_urgent_job_that_yielded_comes_back_as_soon_as_there_is_room():
    clock = Clockwork(2, 40, 1000, max_passed=1)
    first, second = (clock.ask("a", 4, 20) for _ in range(2))
    clock.step()
    other = clock.ask("b", 4, 3)
    clock.step()
    assert (first.state, second.state, other.state) == ("running", "waiting", "running")
    clock.scheduler.finish(first)
    clock.ask("a", 4, 1, priority=-1)
    clock.ask("a", 4, 1, priority=1)
    clock.step()
    assert second.patience == 0
    while len(clock.scheduler):
        clock.step()
    assert clock.latencies[second] < 40


def test_short_prompts_pass_a_long_one_which_gets_the_rest():
    clock = Clockwork(8, 20, 1000)
    long = clock.ask(None, 200, 1)
    clock.step()
    shorts = []
    while long.state != "finished":
        shorts += [clock.ask(None, 5, 1) for _ in range(2)]
        clock.step()
    assert all(clock.latencies[job] == 1 for job in shorts)
    assert clock.latencies[long] == 19  # 20 tokens of the first step, 10 of each other one


def test_a_long_prompt_goes_on_beside_more_short_ones_than_there_is_room_for():
    clock = Clockwork(8, 20, 1000)
    long = clock.ask(None, 200, 1)
    while long.state != "finished":
        for _ in range(3):
            clock.ask(None, 10, 1)
        clock.step()
    assert clock.latencies[long] <= 32  # 8 steps behind, then half of each


def test_a_short_prompt_has_the_whole_step_beside_a_long_one():
    clock = Clockwork(8, 20, 1000)
    long = clock.ask(None, 200, 1)
    clock.step()
    short = clock.ask(None, 20, 1)
    clock.step()
    assert (clock.latencies[short], long.num_computed) == (1, 20)
    clock.step()
    assert long.num_computed == 40


@drawn(50, 2000, budget=st.integers(0, 60), spent=st.lists(st.integers(0, 30), max_size=6))
def test_parts_of_a_step_are_as_equal_as_what_was_spent_allows(budget, spent):
    parts = divided(budget, spent)
    assert sum(parts) == (budget if spent else 0)
    assert min(parts, default=0) >= 0
    after = [has + part for has, part in zip(spent, parts, strict=True)]
    given = [level for level, part in zip(after, parts, strict=True) if part]
    assert max(given, default=0) <= min(after, default=0) + 1
