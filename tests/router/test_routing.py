"""The decision which replica a request goes to."""

from collections import Counter

import pytest

from quire.errors import ConfigError
from quire.routing import ROUTERS, PrefixAware, RoundRobin, SessionAffinity, Target, router_named


def idle(count, *, cached=None):
    cached = cached or {}
    return [Target(f"replica {at}", 0, cached.get(at, ())) for at in range(count)]


def loaded(*loads, cached=None):
    cached = cached or {}
    return [Target(f"replica {at}", load, cached.get(at, ())) for at, load in enumerate(loads)]


def test_round_robin_takes_each_in_turn():
    router = RoundRobin()
    assert [router(idle(3)) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_the_least_loaded_is_the_first_of_equals():
    assert router_named("least-loaded")(loaded(3, 1, 2, 1)) == 1


@pytest.mark.parametrize("name", ROUTERS)
def test_equal_calls_of_two_routers_give_equal_answers_and_one_replica_is_always_the_one(name):
    calls = [
        (loaded(at % 3, 2, at % 5), f"session {at % 7}" if at % 2 else None) for at in range(99)
    ]
    one, other = router_named(name), router_named(name)
    answers = [one(*call) for call in calls]
    assert answers == [other(*call) for call in calls]
    assert {router_named(name)(idle(1), session) for session in (None, "s")} == {0}


def test_power_of_two_takes_the_less_loaded_of_two_drawn_replicas():
    router = router_named("power-of-two")
    taken = Counter(router(loaded(0, 0, 0, 9)) for _ in range(400))
    assert 3 not in taken
    assert min(taken[at] for at in range(3)) > 80
    assert {router(loaded(1, 0)) for _ in range(50)} == {1}


def test_a_session_stays_and_only_those_of_a_replica_that_goes_move():
    router = SessionAffinity()
    sessions = [f"s{number}" for number in range(300)]
    homes = {each: router(idle(4), each) for each in sessions}
    assert {router(loaded(9, 0, 4, 1), each) - homes[each] for each in sessions} == {0}
    assert min(Counter(homes.values()).values()) > 40
    without = [each for each in idle(4) if each.name != "replica 2"]
    for each, home in homes.items():
        moved = without[router(without, each)].name
        assert moved == f"replica {home}" or home == 2


def test_the_prefix_that_saves_most_wins_by_tier():
    router = PrefixAware()
    assert router(idle(3, cached={1: (40,), 2: (50,)})) == 2
    assert router(idle(3, cached={1: (40,), 2: (0, 50)})) == 1
    assert router(idle(3, cached={0: (10, 0, 70), 1: (40, 0, 0), 2: (0, 59, 0)})) == 0
    assert router(idle(2, cached={0: (0, 0, 0, 70), 1: (34,)})) == 0  # beyond the last: as the last


def test_a_replica_over_its_load_limit_is_passed_over_despite_its_hit():
    router = PrefixAware(load_limit=1.25)
    holds = {0: (1000,)}
    assert router(loaded(3, 1, 1, cached=holds)) != 0
    assert router(loaded(1, 1, 1, cached=holds)) == 0
    assert PrefixAware(load_limit=2)(loaded(3, 1, 1, cached=holds)) == 0


def test_a_session_decides_among_equals_and_the_load_where_there_is_none():
    router = PrefixAware(load_limit=4)
    equal = {0: (32,), 1: (32,)}
    for session in map(str, range(20)):
        home = SessionAffinity()(idle(2), session)
        assert router(loaded(1, 0, 0, cached=equal), session) == home
        assert router(idle(3), session) == SessionAffinity()(idle(3), session)
    assert router(loaded(1, 0, 0, cached=equal)) == 1


def test_prefix_routing_without_a_hit_takes_the_less_loaded_of_two():
    router = PrefixAware()
    taken = Counter(router(idle(4)) for _ in range(400))
    assert min(taken[at] for at in range(4)) > 50


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="did you mean round-robin"):
        router_named("round_robbin")
    with pytest.raises(ConfigError, match="load limit is 1 or more, got"):
        router_named("prefix", load_limit=0.5)
    with pytest.raises(ConfigError, match="worth of a tier is from 0 to 1"):
        PrefixAware(worth=(1.5,))
