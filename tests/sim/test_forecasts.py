"""Forecasts of return: how they rank, whom they are believed, and that nothing is lost by them."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from learned_help import LearnedCache

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
@example(1.0, 87.0, 1.0, 0.99)  # a 900th of the returns is left
@settings(deadline=None)
def test_a_rank_is_the_chance_of_a_return_over_the_time_that_it_is_held(s, within, trust, passed):
    forecast = expected(soon(s, within=within)).forecast
    forecast.trust = trust
    now = passed * forecast.last
    # Returns that are as likely as each other on a scale of logarithms, and those that never come.
    returns = forecast.first * (forecast.last / forecast.first) ** (
        (np.arange(400_000) + 0.5) / 400_000
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
    cache = LearnedCache(24)
    sooner, later = cache.names(8), cache.names(8)
    cache.serve(sooner, hint=soon(5))
    cache.now = 1.0
    cache.serve(later, hint=soon(500))
    cache.now = 2.0
    cache.serve(cache.names(12))
    assert (cache.found(sooner), cache.found(later)) == (8, 4)


def test_blocks_whose_return_was_missed_are_evicted_before_awaited_ones():
    cache = LearnedCache(24)
    missed, awaited = cache.names(8), cache.names(8)
    cache.serve(missed, hint=soon(5))
    cache.now = 10.0
    cache.serve(awaited, hint=soon(60))
    cache.now = 11.0
    cache.serve(cache.names(12))
    assert (cache.found(missed), cache.found(awaited)) == (4, 8)


def test_the_next_turn_says_when_the_one_after_it_comes():
    cache = LearnedCache(32)
    talk, other = cache.names(8), cache.names(8)
    cache.serve(talk, hint=soon(2))
    cache.serve(other, hint=soon(20))
    cache.now = 2.0
    talk += cache.names(2)
    cache.serve(talk, hint=soon(1000))
    cache.serve(cache.names(16))
    assert (cache.found(talk), cache.found(other)) == (8, 8)
    cache.serve(cache.names(8))
    assert cache.found(other) == 8


def test_a_shared_prefix_stays_though_one_user_returns_late():
    cache = LearnedCache(40)
    system = cache.names(8)
    late, early = system + cache.names(8), system + cache.names(8)
    cache.serve(system)
    cache.serve(early, hint=soon(3))
    cache.serve(late, hint=soon(900))
    cache.now = 1.0
    cache.serve(cache.names(20))
    assert cache.found(early) == 16
    assert cache.found(late) < 16


@pytest.mark.parametrize("shared", [7, 9, 12])
def test_a_second_user_of_a_system_prompt_leaves_the_forecast_of_the_first(shared):
    cache = LearnedCache(32)
    system = cache.names(shared)
    first, second = system + cache.names(14 - shared), system + cache.names(14 - shared)
    cache.serve(first, hint=soon(20))
    cache.now = 1.0
    cache.serve(second, hint=soon(60))
    cache.serve(cache.names(shared + 6))  # takes the rest, and two blocks more
    assert cache.found(first) == 14
    assert cache.found(second) < 14


def test_unhinted_blocks_rank_lower_once_unhinted_ones_did_not_return():
    cache = LearnedCache(64)
    for turn in range(60):
        cache.now = 10.0 * turn
        talk = cache.names(4)
        cache.serve(talk, hint=soon(2))
        cache.serve(cache.names(4))
        cache.now += 2.0
        cache.serve(talk + cache.names(2), hint=soon(2))
    silent, told = Record(silent=True), Record()
    for record in (silent, told):
        cache.mind.model.watch(record, ())
    assert silent.kind < told.kind


def test_blocks_past_their_return_rank_lower_once_none_returned_late():
    cache = LearnedCache(64)
    for turn in range(60):
        cache.now = 10.0 * turn
        cache.serve(cache.names(4), hint=soon(2))
    record = Record()
    cache.mind.model.watch(record, ())
    before = record.kind
    cache.mind.model.learn(record, UNMET)
    assert record.kind < before


def test_a_never_hint_after_return_times_gives_up_earlier_turns():
    cache = LearnedCache(32)
    talk, other = cache.names(8), cache.names(8)
    cache.serve(talk, hint=soon(2))
    cache.serve(other)
    cache.now = 2.0
    cache.serve(talk + cache.names(2), hint=Hint("never"))
    cache.serve(cache.names(24))
    assert (cache.found(talk), cache.found(other)) == (0, 8)


def test_a_never_hint_beside_return_times_covers_the_requests_own_tokens():
    cache = LearnedCache(40)
    talk, other = cache.names(8), cache.names(8)
    cache.serve(talk, hint=soon(2))
    cache.now = 1.0
    cache.serve(other, hint=soon(60))
    cache.now = 2.0
    trial = talk + cache.names(8)
    cache.serve(trial, hint=Hint("never", returns_in_s=5))
    cache.serve(cache.names(28))
    assert (cache.found(trial), cache.found(other)) == (8, 4)


@pytest.mark.ci
@drawn(16, 400, st.integers(0, 10**6), st.integers(10, 60))
def test_whatever_is_foretold_no_entry_is_lost(seed, capacity):
    random, cache = Random(seed), LearnedCache(capacity)
    talks = [[] for _ in range(5)]
    for _ in range(60):
        cache.now += random.choice((0.0, 0.5, 3.0, 40.0))
        at = random.randrange(len(talks))
        if random.random() < 0.2 or len(talks[at]) > capacity - 6:
            talks[at] = talks[random.randrange(5)][: random.randint(0, 3)]
        talks[at] = talks[at] + cache.names(random.randint(0, 3))
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
        cache.serve(talks[at], cache.names(random.randint(0, 2)), hint=hint, priority=priority)
        if random.random() < 0.1:
            cache.mind.is_lru = not cache.mind.is_lru
        if random.random() < 0.1:
            cache.manager.end_session("a")
    cache.serve(cache.names(capacity))  # takes all the room there is
