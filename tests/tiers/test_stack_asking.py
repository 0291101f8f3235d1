"""The decision to ask and wait for a tier by expected gain, and the return of suspended tiers."""

import pytest
from stack_help import KEYS, RECORDS, SIZE, Stacked, load, put

from quire.tiers.base import Outcome
from quire.tiers.stack.asking import PROBE_S
from quire.tiers.stack.settings import StackSettings

TEN = list(range(10))
SIZES = [SIZE] * 10


def find(stack, start=0, saved_s=0.1, count=10):
    keys = KEYS[start : start + count]
    return stack.find(keys, saved_s=saved_s, num_bytes=SIZE * count)


def asked(tier):
    return len(tier.asked("contains"))


def test_a_tier_that_has_what_it_is_asked_for_is_waited_for_while_that_gains():
    def scenario(stack, host, remote):
        put(remote, range(200))
        remote.contains_s = 0.02
        for start in range(0, 100, 10):
            assert find(stack, start, saved_s=0.1) == [1] * 10
        assert find(stack, 100, saved_s=0.015) == [-1] * 10

    Stacked("host", "remote").run(scenario)


def test_misses_that_take_longer_than_they_can_gain_are_not_waited_for():
    def scenario(stack, host, remote):
        remote.contains_s = 0.02
        waits = []
        for turn in range(20):
            waits.append(stacked.timed(lambda turn=turn: find(stack, 10 * turn))[1])
            stacked.lanes.sleep(1.0)
        assert waits[:2] == [0.02, 0.02]
        assert waits[5:] == [0.0] * 15
        assert asked(remote) == 20, "what it has is found out beside"

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


def test_probing_lookups_take_a_small_part_of_the_time():
    def scenario(stack, host, remote):
        remote.contains_s = 0.02
        for turn in range(5):
            find(stack, 10 * turn)
        before = asked(remote)
        for turn in range(100):
            find(stack, 10 * turn % 900)
            stacked.lanes.sleep(0.02)
        assert asked(remote) - before <= 2.0 / 0.02 * 0.2 + 1

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


def test_among_misses_a_prompt_that_was_found_beside_is_waited_for():
    def scenario(stack, host, remote):
        put(remote, range(500, 510))
        remote.contains_s = 0.02
        for turn in range(10):
            find(stack, 10 * turn)
            stacked.lanes.sleep(1.0)
        assert find(stack, 500) == [-1] * 10
        stacked.lanes.sleep(1.0)
        assert find(stack, 500) == [1] * 10
        assert find(stack, 200) == [-1] * 10

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


def test_misses_are_asked_for_where_the_answer_takes_next_to_nothing_of_computing():
    def scenario(stack, host, remote):
        remote.contains_s = 0.002
        for turn in range(20):
            assert stacked.timed(lambda turn=turn: find(stack, 10 * turn, saved_s=0.2))[1] == 0.002

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


def test_all_tiers_are_asked_without_a_gate_or_saved_time():
    def scenario(stack, host, remote):
        remote.contains_s = 0.02
        for turn in range(10):
            find(stack, 10 * turn)
        stacked.lanes.sleep(1.0)
        assert stacked.timed(lambda: stack.find(KEYS[:10]))[1] == 0.02

    stacked = Stacked("host", "remote")
    stacked.run(scenario)
    stacked = Stacked("host", "remote", gate=False)

    def ungated(stack, host, remote):
        remote.contains_s = 0.02
        for turn in range(10):
            assert stacked.timed(lambda turn=turn: find(stack, 10 * turn))[1] == 0.02

    stacked.run(ungated)


def test_a_tier_is_asked_again_after_one_slow_answer():
    def scenario(stack, host, remote):
        put(remote, [0])
        find(stack, 0, count=1)
        remote.contains_s = 0.035
        find(stack, 0, count=1, saved_s=0.05)
        remote.contains_s = 0.0
        assert find(stack, 0, count=1, saved_s=0.05) == [1]

    Stacked("host", "remote").run(scenario)


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tier_whose_loads_do_not_pay_is_measured_beside_until_they_do(is_kept):
    def scenario(stack, host, remote):
        put(remote, TEN)
        keys, sizes = KEYS[:10], [SIZE] * 10
        remote.get_s, remote.contains_s = 0.5, 0.001

        def request():
            found = find(stack)
            if stack.choose(keys, found, sizes, lambda n: 0.01 * (10 - n)):
                return load(stack, TEN, found=found)
            return None

        for _ in range(2):
            request()
        assert stacked.timed(request) == (None, 0.0), "it is not asked"
        remote.get_s = 0.0
        if not is_kept:
            remote.records.clear()
            stacked.lanes.sleep(PROBE_S)
            request()
            stacked.lanes.sleep(PROBE_S)
            put(remote, TEN)
        for _ in range(8):
            stacked.lanes.sleep(PROBE_S)
            request()
        stacked.lanes.sleep(PROBE_S)
        assert request() == ["hit"] * 10

    stacked = Stacked("host", "remote", promote=False)
    stacked.run(scenario)


def test_a_slow_tier_in_memory_is_treated_as_any_other():
    def scenario(stack, host):
        host.contains_s = 0.02
        for turn in range(10):
            find(stack, 10 * turn)
            stacked.lanes.sleep(1.0)
        assert stacked.timed(lambda: find(stack, 500))[1] == 0.0

    stacked = Stacked("host")
    stacked.run(scenario)


def test_surely_lacks_knows_a_missing_key_if_all_tiers_answer_at_once():
    def scenario(stack, host, other):
        assert stack.surely_lacks(KEYS[0])
        put(other, [1])
        put(host, [2])
        stack.feeding.begin(KEYS[3:4], lambda: None, 100)
        assert not any(stack.surely_lacks(KEYS[at]) for at in (1, 2, 3))
        stack.feeding.catch_up()
        assert stack.surely_lacks(KEYS[3])
        stack._levels[1].reading.open()  # it is to be tried again, which only `find` does
        assert not stack.surely_lacks(KEYS[0])

    Stacked("host", "host").run(scenario)

    def remotely(stack, host, remote):
        assert not stack.surely_lacks(KEYS[0])
        assert not remote.calls

    Stacked("host", "remote").run(remotely)


# A server that hangs


@pytest.mark.parametrize("saved_s", [0.02, 0.13, 0.3])
def test_a_load_of_which_nothing_comes_is_given_up_for_half_of_computing_and_50_ms(saved_s):
    def scenario(stack, host, remote):
        put(remote, TEN)
        remote.get_s = 1e3

        def request():
            found = find(stack, saved_s=saved_s)
            places = [where for where in found if where >= 0]
            stack.load(KEYS[: len(places)], [SIZE] * len(places), found=places, saved_s=saved_s)

        _, took_s = stacked.timed(request)
        assert took_s <= saved_s / 2 + 0.015 + 1e-6
        for _ in range(100):
            stacked.lanes.sleep(saved_s)
            assert stacked.timed(request)[1] == 0.0, "the next ones are as without it"

    stacked = Stacked("host", "remote", cool_down_s=100.0)
    stacked.run(scenario)


def test_a_lookup_that_hangs_is_given_up_as_soon_and_asked_again_beside():
    def scenario(stack, host, remote):
        put(remote, TEN)
        remote.contains_s = 1e3
        assert stacked.timed(lambda: find(stack, saved_s=0.05)) == ([-1] * 10, 0.04)
        assert stacked.timed(lambda: find(stack, saved_s=0.05)) == ([-1] * 10, 0.0)
        remote.contains_s = 0.0
        stacked.lanes.sleep(2.0)
        find(stack, saved_s=0.05)
        stacked.lanes.sleep(0.1)
        assert find(stack, saved_s=0.05) == [1] * 10

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


@pytest.mark.parametrize("call", ["_contains", "_get"])
def test_a_trial_in_which_a_tier_raises_is_followed_by_others(call):
    """With one thread there is one trial at a time: one that were never heard of would be the last."""

    def scenario(stack, remote):
        put(remote, TEN)
        keys, sizes = KEYS[:10], [SIZE] * 10
        stack.choose(keys, find(stack), sizes, lambda n: 10.0 - n)
        stack._levels[0].reading.open()
        setattr(remote, call, raising)
        for _ in range(3):
            stacked.lanes.sleep(100.0)
            assert find(stack) in ([0] * 10, [-1] * 10)
        stacked.lanes.sleep(1.0)
        delattr(remote, call)
        for _ in range(3):
            stacked.lanes.sleep(1000.0)
            found = find(stack)
            stacked.lanes.sleep(1.0)
        assert found == [0] * 10
        assert stack._levels[0].asking.num_trials == 0

    def raising(*_):
        raise RuntimeError("a tier of others")

    stacked = Stacked("remote", threads=1)
    stacked.run(scenario)


def test_a_slow_load_that_goes_on_coming_is_not_given_up():
    def scenario(stack, host, remote):
        put(remote, TEN)

        def slowly(keys, buffers, timeout_s, answers):
            for index, key in enumerate(keys):
                stacked.lanes.sleep(0.06)
                buffers[index][:] = RECORDS[KEYS.index(key)]
                answers.settle(index, Outcome.HIT)

        remote._get = slowly
        call = lambda: stack.load(KEYS[:10], SIZES, found=[1] * 10, saved_s=0.1)  # noqa: E731
        assert stacked.timed(call) == ((["hit"] * 10, RECORDS[:10]), 0.6)
        assert stack.stats().tiers[1].reading == "closed"

    stacked = Stacked("host", "remote")
    stacked.run(scenario)


def test_several_tiers_that_hang_take_no_longer_than_one():
    def scenario(stack, disk, remote):
        for tier in (disk, remote):
            put(tier, TEN)
            tier.get_s = 1e3
        call = lambda: stack.load(KEYS[:10], SIZES, saved_s=0.2)  # noqa: E731
        (outcomes, _), took_s = stacked.timed(call)
        assert (outcomes, took_s) == (["timeout"] * 10, 0.115)
        assert {each.reading for each in stack.stats().tiers} == {"open"}

    stacked = Stacked("disk", "remote")
    stacked.run(scenario)


def test_without_a_gate_a_load_has_all_of_its_time():
    def scenario(stack, remote):
        put(remote, TEN)
        remote.get_s = 3.0
        outcomes, _ = stack.load(KEYS[:10], SIZES, saved_s=0.1)
        assert outcomes == ["hit"] * 10

    Stacked("remote", gate=False).run(scenario)
    assert StackSettings().gate
