"""The circuit breaker: when a tier is left alone, and when it is tried again."""

import pytest

from clocks import Clock
from quire.tiers.stack.asking import Breaker, BreakerState


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def breaker(clock):
    return Breaker(clock, failures=3, cool_down_s=1.0)


def fail(breaker, times, kind="load"):
    for _ in range(times):
        breaker.failed(kind)


def pause_until_trial(breaker, clock):
    waited_s = 0.0
    while not breaker.take_trial():
        clock.now += 0.25
        waited_s += 0.25
        assert waited_s < 100
    return waited_s


def test_a_breaker_opens_after_consecutive_failures(breaker):
    fail(breaker, 2)
    assert breaker.allows
    fail(breaker, 1)
    assert not breaker.allows


def test_a_success_resets_the_count_of_failures(breaker):
    fail(breaker, 2)
    breaker.succeeded("load")
    fail(breaker, 2)
    assert breaker.allows


def test_lookups_that_succeed_do_not_hide_loads_that_fail(breaker):
    for _ in range(3):
        breaker.succeeded("lookup")
        breaker.failed("load")
    assert not breaker.allows


def test_a_breaker_allows_one_trial_after_the_cool_down(breaker, clock):
    fail(breaker, 3)
    assert not breaker.take_trial()
    assert pause_until_trial(breaker, clock) == 1.0
    assert not breaker.take_trial()
    assert breaker.state is BreakerState.TRYING


def test_a_trial_that_succeeds_closes_the_breaker(breaker, clock):
    fail(breaker, 3)
    pause_until_trial(breaker, clock)
    breaker.succeeded("lookup")
    assert breaker.allows


def test_the_cool_down_doubles_up_to_a_limit(breaker, clock):
    fail(breaker, 3)
    pauses = []
    for _ in range(8):
        pauses.append(pause_until_trial(breaker, clock))
        breaker.failed("load")
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 64]


def test_the_first_failure_after_a_trial_opens_it_for_longer(breaker, clock):
    fail(breaker, 3)
    pause_until_trial(breaker, clock)
    breaker.succeeded("lookup")
    breaker.failed("load")
    assert not breaker.allows
    assert pause_until_trial(breaker, clock) == 2.0


def test_a_breaker_closes_after_as_many_successes(breaker, clock):
    fail(breaker, 3)
    pause_until_trial(breaker, clock)
    breaker.succeeded("load")
    for _ in range(3):
        breaker.succeeded("load")
    fail(breaker, 2)
    assert breaker.allows
    fail(breaker, 1)
    assert pause_until_trial(breaker, clock) == 1.0


def test_a_trial_that_is_never_heard_of_is_made_again(breaker, clock):
    fail(breaker, 3)
    pause_until_trial(breaker, clock)
    assert pause_until_trial(breaker, clock) == 1.0


def test_failures_of_calls_that_were_on_their_way_change_nothing_while_it_is_open(breaker, clock):
    fail(breaker, 10)
    assert breaker.num_opened == 1
    assert pause_until_trial(breaker, clock) == 1.0


def test_a_clock_that_jumps_ends_a_cool_down(breaker, clock):
    fail(breaker, 3)
    clock.now += 1e6
    assert breaker.take_trial()
