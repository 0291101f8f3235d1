"""Forecasts of return: how they rank, whom they are believed, and that nothing is lost by them."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learned import World

from quire.core import Scope
from quire.core.terms import Hint
from quire.foresight.forecast import GRANTED, log
from quire.foresight.forecasts import MAX_CREDITS, Forecasts
from quire.foresight.reentry import UNMET, Record
from turns import drawn

seconds = st.floats(0.01, 1e6)
factors = st.floats(1.0, 100.0)


def soon(s, **options):
    return Hint(returns_in_s=s, **options)


def expected(hint, now=0.0, forecasts=None, scope=None, kind=0):
    record = Record(time=now, prompt=100)
    (forecasts or Forecasts()).expect(record, kind, scope or Scope(), hint, now)
    return record


# -- the rank of one forecast --------------------------------------------------------------------


@given(st.floats(1e-9, 1e12))
def test_the_logarithm_is_that_of_the_library_to_seven_places(x):
    assert log(x) == pytest.approx(math.log(x), rel=1e-7, abs=1e-7)


@given(seconds, factors, st.floats(0.25, 1.0), st.floats(0.0, 0.99))
@settings(deadline=None)
def test_a_rank_is_the_chance_of_a_return_over_the_time_that_it_is_held(s, within, trust, passed):
    forecast = expected(soon(s, within=within)).forecast
    forecast.trust = trust
    now = passed * forecast.last
    # Returns that are as likely as each other on a scale of logarithms, and those that never come.
    returns = forecast.first * (forecast.last / forecast.first) ** (
        (np.arange(20_000) + 0.5) / 20_000
    )
    left = returns[returns > now]
    chance = trust * len(left) / len(returns)
    chance /= chance + 1 - trust
    wait = (left - now).mean() if len(left) else 0.0
    held = chance * wait + (1 - chance) * (forecast.last - now)
    assert forecast.rank(now) == pytest.approx(chance / held, rel=0.02)


@given(seconds, factors)
def test_a_forecast_is_worth_nothing_once_its_time_is_over(s, within):
    forecast = expected(soon(s, within=within)).forecast
    assert forecast.rank(forecast.last) == 0.0
    assert forecast.rank(2 * forecast.last) == 0.0


@given(st.lists(seconds, min_size=2, max_size=2, unique=True), factors)
def test_a_later_expected_return_ranks_lower(both, within):
    sooner, later = (expected(soon(s, within=within)).forecast for s in sorted(both))
    assert sooner.rank(0.0) >= later.rank(0.0)


def test_blocks_rarely_found_again_rank_as_if_they_returned_later():
    forecasts = Forecasts()
    for number in range(40):
        for kind, found in ((1, 100), (2, 10)):
            now = 100.0 * number
            record = expected(soon(10), now, forecasts, kind=kind)
            forecasts.found(record, found)
            forecasts.returned(record, now + 10)
    whole, part, new = (expected(soon(10), 1e4, forecasts, kind=k).forecast for k in (1, 2, 3))
    assert whole.share == new.share == 1.0
    assert part.share == pytest.approx(0.1, abs=0.01)
    assert part.rank(1e4) == pytest.approx(part.share * whole.rank(1e4))
    assert part.held_for - 1e4 == pytest.approx((whole.held_for - 1e4) / part.share)


def test_the_share_of_a_kind_counts_stored_tokens_only():
    forecasts = Forecasts()
    record = expected(soon(10), 0.0, forecasts)
    record.found = 60
    forecasts.found(record, 60)
    assert record.forecast.kind.share == 1.0
    forecasts.found(record, 80)
    assert record.forecast.kind.share == pytest.approx((GRANTED + 20) / (GRANTED + 40))


# -- credit --------------------------------------------------------------------------------------


def test_wrong_forecasts_lower_the_trust_in_their_own_scope_alone():
    forecasts, alice, bob = Forecasts(), Scope(salt="a"), Scope(salt="b")
    before = expected(soon(10), 0.0, forecasts, alice).forecast.trust
    for number in range(40):
        record = expected(soon(10), 100.0 * number, forecasts, alice)
        forecasts.returned(record, 100.0 * number + 99)
    assert expected(soon(10), 1e5, forecasts, alice).forecast.trust < 0.25 < before
    assert expected(soon(10), 1e5, forecasts, bob).forecast.trust == before == 1.0


def test_a_session_that_is_wrong_is_believed_less_than_the_others_of_its_caller():
    forecasts = Forecasts()
    for number in range(60):
        now = 1000.0 * number
        for name, gap in (("late", 99.0), ("right", 11.0)):
            forecasts.returned(expected(soon(10, session_id=name), now, forecasts), now + gap)
    late, right, new = (
        expected(soon(10, session_id=name), 1e6, forecasts).forecast.trust
        for name in ("late", "right", "new")
    )
    assert late < 0.3 < new < 0.7 < right


@pytest.mark.parametrize(("gap", "right"), [(4.9, 0), (5.1, 1), (19.9, 1), (20.1, 0)])
def test_a_forecast_is_right_within_its_factor_both_ways(gap, right):
    forecasts = Forecasts()
    record = expected(soon(10, within=2.0), 0.0, forecasts)
    (credit,) = record.forecast.credits
    forecasts.returned(record, gap)
    assert (credit.right, credit.seen) == (right, 1)
    forecasts.returned(record, gap)
    assert credit.seen == 1


def test_a_missed_return_counts_as_wrong_and_ends_the_forecast():
    forecasts = Forecasts()
    record = expected(soon(10), 0.0, forecasts)
    (credit,) = record.forecast.credits
    forecasts.advance(19.9)
    assert record.forecast is not None
    forecasts.advance(20.1)
    assert record.forecast is None
    assert (credit.right, credit.seen) == (0, 1)


def test_callers_are_remembered_however_many_sessions_they_have():
    forecasts, alice = Forecasts(), Scope(salt="a")
    for number in range(50):
        now = 100.0 * number
        forecasts.returned(expected(soon(10), now, forecasts, alice), now + 99)
    for number in range(2 * MAX_CREDITS):
        expected(soon(10, session_id=f"{number}"), 1e4, forecasts, alice)
    assert len(forecasts._credits) <= MAX_CREDITS
    assert expected(soon(10), 1e5, forecasts, alice).forecast.trust < 0.25


# -- the order of eviction -----------------------------------------------------------------------


def test_blocks_expected_later_are_evicted_first_even_if_used_last():
    world = World(24)
    sooner, later = world.names(8), world.names(8)
    world.serve(sooner, hint=soon(5))
    world.now = 1.0
    world.serve(later, hint=soon(500))
    world.now = 2.0
    world.serve(world.names(12))
    assert (world.found(sooner), world.found(later)) == (8, 4)


def test_blocks_whose_return_was_missed_are_evicted_before_awaited_ones():
    world = World(24)
    missed, awaited = world.names(8), world.names(8)
    world.serve(missed, hint=soon(5))
    world.now = 10.0
    world.serve(awaited, hint=soon(60))
    world.now = 11.0
    world.serve(world.names(12))
    assert (world.found(missed), world.found(awaited)) == (4, 8)


def test_the_next_turn_says_when_the_one_after_it_comes():
    world = World(32)
    talk, other = world.names(8), world.names(8)
    world.serve(talk, hint=soon(2))
    world.serve(other, hint=soon(20))
    world.now = 2.0
    talk += world.names(2)
    world.serve(talk, hint=soon(1000))
    world.serve(world.names(16))
    assert (world.found(talk), world.found(other)) == (8, 8)
    world.serve(world.names(8))
    assert world.found(other) == 8


def test_a_shared_prefix_stays_though_one_user_returns_late():
    world = World(40)
    system = world.names(8)
    late, early = system + world.names(8), system + world.names(8)
    world.serve(system)
    world.serve(early, hint=soon(3))
    world.serve(late, hint=soon(900))
    world.now = 1.0
    world.serve(world.names(20))
    assert world.found(early) == 16
    assert world.found(late) < 16


@pytest.mark.parametrize("shared", [7, 9, 12])
def test_a_second_user_of_a_system_prompt_leaves_the_forecast_of_the_first(shared):
    world = World(32)
    system = world.names(shared)
    first, second = system + world.names(14 - shared), system + world.names(14 - shared)
    world.serve(first, hint=soon(20))
    world.now = 1.0
    world.serve(second, hint=soon(60))
    world.serve(world.names(shared + 6))  # takes the rest, and two blocks more
    assert world.found(first) == 14
    assert world.found(second) < 14


def test_unhinted_blocks_rank_lower_once_unhinted_ones_did_not_return():
    world = World(64)
    for turn in range(60):
        world.now = 10.0 * turn
        talk = world.names(4)
        world.serve(talk, hint=soon(2))
        world.serve(world.names(4))
        world.now += 2.0
        world.serve(talk + world.names(2), hint=soon(2))
    silent, told = Record(silent=True), Record()
    for record in (silent, told):
        world.mind.model.watch(record, ())
    assert silent.kind < told.kind


def test_blocks_past_their_return_rank_lower_once_none_returned_late():
    world = World(64)
    for turn in range(60):
        world.now = 10.0 * turn
        world.serve(world.names(4), hint=soon(2))
    record = Record()
    world.mind.model.watch(record, ())
    before = record.kind
    world.mind.model.learn(record, UNMET)
    assert record.kind < before


def test_a_never_hint_after_return_times_gives_up_earlier_turns():
    world = World(32)
    talk, other = world.names(8), world.names(8)
    world.serve(talk, hint=soon(2))
    world.serve(other)
    world.now = 2.0
    world.serve(talk + world.names(2), hint=Hint("never"))
    world.serve(world.names(24))
    assert (world.found(talk), world.found(other)) == (0, 8)


def test_a_never_hint_beside_return_times_covers_the_requests_own_tokens():
    world = World(40)
    talk, other = world.names(8), world.names(8)
    world.serve(talk, hint=soon(2))
    world.now = 1.0
    world.serve(other, hint=soon(60))
    world.now = 2.0
    trial = talk + world.names(8)
    world.serve(trial, hint=Hint("never", returns_in_s=5))
    world.serve(world.names(28))
    assert (world.found(trial), world.found(other)) == (8, 4)


@pytest.mark.ci
@drawn(16, 400, st.integers(0, 10**6), st.integers(10, 60))
def test_whatever_is_foretold_no_entry_is_lost(seed, capacity):
    random, world = Random(seed), World(capacity)
    talks = [[] for _ in range(5)]
    for _ in range(60):
        world.now += random.choice((0.0, 0.5, 3.0, 40.0))
        at = random.randrange(len(talks))
        if random.random() < 0.2 or len(talks[at]) > capacity - 6:
            talks[at] = talks[random.randrange(5)][: random.randint(0, 3)]
        talks[at] = talks[at] + world.names(random.randint(0, 3))
        if not talks[at]:
            continue
        time = random.choice((None, 0.01, 2.0, 30.0, 1e4))
        name = random.choice((None, "a", "b"))
        reuse = random.choice(("unknown", "unknown", "never", *["session"] * bool(name)))
        hint = Hint(
            reuse,
            ttl_s=random.choice((None, None, 5.0)),
            session_id=name,
            returns_in_s=time,
            within=random.choice((1.0, 2.0, 10.0)),
        )
        priority = random.choice((0, 0, 0, 1))
        world.serve(talks[at], world.names(random.randint(0, 2)), hint=hint, priority=priority)
        if random.random() < 0.1:
            world.mind.is_lru = not world.mind.is_lru
        if random.random() < 0.1:
            world.manager.end_session("a")
    world.serve(world.names(capacity))  # takes all the room there is
